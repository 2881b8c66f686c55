"""The bundled tiny pair and its held-out prompts, made by ``scripts/train_tiny_pair.py``."""

from pathlib import Path

ASSETS = Path(__file__).parent
TARGET = ASSETS / "tiny-target"
DOMINO = ASSETS / "tiny-domino"
DSPARK = ASSETS / "tiny-dspark"
DFLASH2 = ASSETS / "tiny-dflash2"
PROMPTS = ASSETS / "prompts.jsonl"
