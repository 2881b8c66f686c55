"""Checkpoints of drafters that are not bundled, made from those that are."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_dartree.assets import DFLASH2, DOMINO, DSPARK, TARGET

BACKBONE = DOMINO / "model-00001-of-00002.safetensors"


def _write(folder: Path, config: dict, tensors: dict[str, Tensor]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return str(folder)


def _read(folder: Path) -> tuple[dict, dict[str, Tensor]]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return json.loads((folder / "config.json").read_text()), tensors


def dspark(folder: Path, **changes: object) -> str:
    """The bundled one with changes of its config."""
    shutil.copytree(DSPARK, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


def dspark_of_few_tokens(folder: Path, kept: list[int], logit_scale: float) -> str:
    """The bundled one, able to draft the tokens ``kept`` alone, with scaled logits."""
    config, tensors = _read(DSPARK)
    _, target = _read(TARGET)
    ids = torch.tensor(kept)
    tensors["d2t"] = ids - torch.arange(len(kept))
    tensors["lm_head.weight"] = target["model.embed_tokens.weight"][ids]
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][ids]
    return _write(folder, config | {"draft_vocab_size": len(kept), "logit_scale": logit_scale}, tensors)


def dflash2_with_mixing_rows(folder: Path) -> str:
    """The bundled one, whose convolutions pass every row through, with a little of the row before in each row."""
    config, tensors = _read(DFLASH2)
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("conv.base_kernel"):
            tensor[:, 1] = 0.05 * torch.randn_like(tensor[:, 1])
        elif name.endswith("kernel_projection.weight"):
            tensor.normal_(std=0.002)
    return _write(folder, config, tensors)


def lilicorr(folder: Path, candidates: int = 8, hidden: int = 32, factors: int = 16) -> str:
    """The bundled backbone under a random correlator."""
    config, _ = _read(DSPARK)
    del config["markov_rank"], config["sample_from_anchor"]
    block, size, heads = config["block_size"], config["hidden_size"], 2
    config["architectures"] = ["LiLiCorrDraftModel"]
    config["dflash_config"] |= {
        "lilicorr_candidate_topk": candidates,
        "lilicorr_hidden_size": hidden,
        "lilicorr_num_heads": heads,
        "lilicorr_num_layers": 1,
        "lilicorr_mlp_ratio": 2.0,
        "lilicorr_factor_dim": factors,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 4.0,
    }
    torch.manual_seed(0)

    def linear(name: str, rows: int, columns: int) -> dict[str, Tensor]:
        return {f"{name}.weight": torch.randn(rows, columns) / columns**0.5, f"{name}.bias": 0.1 * torch.randn(rows)}

    layer = {"attn_norm.weight": torch.ones(hidden), "mlp_norm.weight": torch.ones(hidden)}
    layer |= {
        "attn.in_proj_weight": torch.randn(3 * hidden, hidden) / hidden**0.5,
        "attn.in_proj_bias": torch.zeros(3 * hidden),
    }
    layer |= linear("attn.out_proj", hidden, hidden)
    layer |= linear("mlp.up_proj", 2 * hidden, hidden) | linear("mlp.down_proj", hidden, 2 * hidden)
    head = {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    for name in ("token_proj", "pass_hidden_proj", "context_proj"):
        head |= linear(name, hidden, size)
    head |= linear("feature_mlp.up_proj", hidden, 5) | linear("feature_mlp.down_proj", hidden, hidden)
    head |= linear("factor_input_proj", hidden, 3 * hidden)
    for name in ("out_head", "in_head", "anchor_out_head"):
        head |= linear(name, factors, hidden)
    head |= {
        "feature_norm.weight": torch.ones(5),
        "feature_norm.bias": torch.zeros(5),
        "output_norm.weight": torch.ones(hidden),
        "anchor_norm.weight": torch.ones(hidden),
        "slot_embedding": torch.randn(1, 1, block - 1, 1, hidden),
        "rank_embedding": torch.randn(1, 1, 1, candidates, hidden),
        "relative_slot_bias": torch.randn(heads, 2 * block - 1),
        "same_slot_bias": torch.randn(heads),
    }
    return _write(folder, config, load_file(BACKBONE) | {f"lilicorr.{name}": tensor for name, tensor in head.items()})
