"""The bundled pair, loaded once, and a pair with a vocabulary so small that its distributions can be enumerated."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from vllm_dartree.assets import DFLASH2, DOMINO, DSPARK, PROMPTS, TARGET
from vllm_dartree.heads import KINDS
from vllm_dartree.reference.checkpoint import Drafter, Target, load_drafter, load_target
from vllm_dartree.reference.drafter import BlockDrafter
from vllm_dartree.reference.prompts import load_prompts


@pytest.fixture(scope="session")
def target() -> Target:
    return load_target(str(TARGET), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def drafters(target) -> dict[str, Drafter]:
    folders = {"domino": DOMINO, "markov": DSPARK, "selector": DFLASH2}
    return {head: load_drafter(str(folder), target) for head, folder in folders.items()}


@pytest.fixture(scope="session")
def prompts(target) -> list[list[int]]:
    return load_prompts(str(PROMPTS), target.tokenizer)


TINY_VOCAB = 5


@pytest.fixture(scope="session")
def tiny_vocab_pair() -> tuple[Target, Drafter]:
    """An untrained pair over five tokens; its last token is the drafter's mask, and nothing ends a generation."""
    torch.manual_seed(11)
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3Config(
        vocab_size=TINY_VOCAB, intermediate_size=16, num_hidden_layers=1, initializer_range=0.6, **shape
    )
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    target = Target(model, tokenizer=None)
    spec = KINDS["domino"](
        block_size=4,
        mask_token_id=TINY_VOCAB - 1,
        target_layer_ids=(0,),
        gru_hidden_dim=6,
        emb_dim=4,
    )
    backbone = BlockDrafter(config, spec).eval().requires_grad_(False)
    return target, Drafter(backbone, spec, spec.make_head(backbone.state_dict(), target.embedding))
