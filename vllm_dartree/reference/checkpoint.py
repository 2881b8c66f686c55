"""Loading a target and its drafters, from a folder or from the hub, with errors for the person who typed the path."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from vllm_dartree.heads import DrafterSpec
from vllm_dartree.hub import HUB_ERRORS, unavailable
from vllm_dartree.reference.drafter import BlockDrafter
from vllm_dartree.tree import CorrectionHead


class CheckpointError(ValueError):
    """A checkpoint cannot be found, read or used; the message says which and why."""


def local_folder(path: str) -> Path:
    """The folder of a checkpoint: ``path`` itself, or a snapshot from the hub."""
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]))
    except HUB_ERRORS as error:
        raise CheckpointError(unavailable(f"'{path}'", error)) from error


@dataclass
class Target:
    """A target model with its tokenizer, in evaluation mode."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.get_decoder().layers

    @property
    def end_token_ids(self) -> frozenset[int]:
        ids = self.model.generation_config.eos_token_id
        return frozenset([ids] if isinstance(ids, int) else ids or [])


@dataclass
class Drafter:
    """A drafter beside its target: backbone, block and correction head."""

    model: BlockDrafter
    spec: DrafterSpec
    head: CorrectionHead


def load_target(path: str, *, dtype: torch.dtype, device: str) -> Target:
    """Loads a causal language model of ``transformers``.

    Raises:
        CheckpointError: it cannot be found, or has attention that a tree mask does not fit (sliding window).
    """
    folder = local_folder(path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device).eval()
    other = {kind for kind in getattr(model.config, "layer_types", None) or [] if kind != "full_attention"}
    if other:
        raise CheckpointError(
            f"'{path}' has layers of type {', '.join(sorted(other))}; the reference decoder runs full attention only"
        )
    return Target(model.requires_grad_(False), AutoTokenizer.from_pretrained(folder))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else None
    files = [folder / name for name in sorted(names)] if names else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"'{folder}' has no *.safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"'{file}' cannot be read: {error}") from error
    return tensors


def load_drafter(path: str, target: Target) -> Drafter:
    """Loads a block drafter in the target's dtype and on its device; embedding and LM head are the target's.

    Raises:
        CheckpointError: it cannot be found or read, or has missing, surplus or misshapen tensors.
        DrafterConfigError: its config lacks a key, or does not fit the target.
    """
    folder = local_folder(path)
    config_file = folder / "config.json"
    if not config_file.exists():
        raise CheckpointError(f"'{folder}' has no config.json")
    raw = json.loads(config_file.read_text())
    spec = DrafterSpec.from_config(raw)
    config, model_config = Qwen3Config(**raw), target.model.config.get_text_config()
    spec.check_target(
        drafter_hidden=config.hidden_size,
        drafter_vocab=config.vocab_size,
        hidden_size=model_config.hidden_size,
        vocab_size=model_config.vocab_size,
        num_layers=model_config.num_hidden_layers,
    )
    if spec.head == "lilicorr":
        raise CheckpointError(f"'{path}' is a LiLiCorr drafter; the reference decoder has no backbone for it")
    tensors = _read_tensors(folder)
    model = BlockDrafter(config, spec, gru_bias="prefix_gru.bias_ih_l0" in tensors)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    problems = [f"missing '{name}'" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"surplus '{name}'" for name in sorted(tensors.keys() - expected.keys())]
    problems += [
        f"'{name}' has shape {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    problems += [f"'{name}' has NaNs" for name, tensor in tensors.items() if tensor.isnan().any()]
    if problems:
        raise CheckpointError(f"the drafter '{path}' does not fit its config.json: {'; '.join(problems)}")
    model.load_state_dict(tensors)
    model.to(device=target.model.device, dtype=target.model.dtype).eval().requires_grad_(False)
    return Drafter(model, spec, spec.make_head(model.state_dict(), target.embedding))
