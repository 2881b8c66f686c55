"""What a drafter's checkpoint must hold.

vLLM loads a block drafter that lacks a tensor without a word, and names no tensor where a shape is wrong.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig

# Beside those that a checkpoint must have. vLLM checks them itself, or skips them.
OPTIONAL = re.compile(
    r"embed_tokens\.weight|lm_head\.weight|d2t|t2d|layers\.\d+\.self_attn\.(attention_sink_bias|rotary_emb\..*)"
)


class DrafterTensorError(ValueError):
    """A tensor of a drafter's checkpoint cannot be used; the message names it."""


def read_tensors(weights: Iterable[tuple[str, Tensor]], checkpoint: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint.

    Raises:
        DrafterTensorError: a file is broken, or a tensor has values that are no finite numbers.
    """
    tensors = {}
    try:
        for name, tensor in weights:
            # Types below 16 bits belong to quantised checkpoints; they have no test for infinity.
            if tensor.is_floating_point() and tensor.element_size() > 1 and not torch.isfinite(tensor).all():
                raise DrafterTensorError(f"the drafter '{checkpoint}' has NaN or infinity in its tensor '{name}'")
            tensors[name] = tensor
    except SafetensorError as error:
        raise DrafterTensorError(
            f"a *.safetensors file of the drafter '{checkpoint}' is broken, perhaps cut off ({error}); fetch it again"
        ) from error
    return tensors


def backbone_shapes(config: PreTrainedConfig, num_features: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a DFlash backbone that reads ``num_features`` features of the target."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if getattr(config, "attention_bias", False):
        layer |= {f"self_attn.{name}_proj.bias": layer[f"self_attn.{name}_proj.weight"][:1] for name in "qkvo"}
    features = num_features * (getattr(config, "target_hidden_size", None) or hidden)
    shapes = {"fc.weight": (hidden, features), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    numbers = range(config.num_hidden_layers)
    return shapes | {f"layers.{i}.{name}": shape for i in numbers for name, shape in layer.items()}


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], checkpoint: str) -> None:
    """Refuses tensors that are not those of ``shapes``.

    Raises:
        DrafterTensorError: naming all that are missing, surplus or of a wrong shape.
    """
    problems = [f"no tensor '{name}'" for name in sorted(shapes.keys() - tensors.keys())]
    for name in sorted(tensors):
        if name not in shapes:
            if not OPTIONAL.fullmatch(name):
                problems.append(f"a tensor '{name}' that its config.json has no use for")
        elif tuple(tensors[name].shape) != shapes[name]:
            wanted = list(shapes[name])
            problems.append(f"'{name}' of shape {list(tensors[name].shape)} where its config.json needs {wanted}")
    if problems:
        raise DrafterTensorError(
            f"the drafter '{checkpoint}' does not fit its config.json: it has {'; '.join(problems)}"
        )
