"""Targets of other kinds, made of the bundled one's weights: a random tiny model repeats one token and hides bugs."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_dartree.assets import TARGET

Tensors = dict[str, Tensor]


def bundled() -> tuple[dict, Tensors]:
    """Config and float32 tensors of the bundled target."""
    tensors = load_file(TARGET / "model.safetensors")
    return json.loads((TARGET / "config.json").read_text()), {name: t.float() for name, t in tensors.items()}


def write(folder: Path, config: dict, tensors: Tensors) -> str:
    """A checkpoint with the bundled target's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TARGET / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def noise(like: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator) * like.std() * scale


def untied(folder: Path, seed: int = 1) -> str:
    """The LM head is not the embedding, and every weight is a little off."""
    config, tensors = bundled()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    generator = torch.Generator().manual_seed(seed)
    matrices = {name: weight + noise(weight, 0.1, generator) for name, weight in tensors.items() if weight.dim() > 1}
    return write(folder, config | {"tie_word_embeddings": False}, tensors | matrices)


def moe(folder: Path, num_experts: int = 4) -> str:
    """Qwen3-MoE, two of whose experts compute each token; every expert is the bundled MLP with noise of its own."""
    config, tensors = bundled()
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if ".mlp." in name]:
        layer, projection = name.split(".mlp.")
        weight = tensors.pop(name)
        for expert in range(num_experts):
            tensors[f"{layer}.mlp.experts.{expert}.{projection}"] = weight + noise(weight, 0.3, generator)
        tensors[f"{layer}.mlp.gate.weight"] = torch.randn(num_experts, config["hidden_size"], generator=generator)
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return write(folder, config, tensors)


def with_heads(folder: Path, head_size: int, num_heads: int, num_kv_heads: int) -> str:
    """The same function of other heads: those that are more are copies, and those that are larger have zeros behind.

    RoPE turns the old part alone, and the weights of the norms make up for the zeros.
    """
    config, tensors = bundled()
    old_size, old_heads = config["head_dim"], config["num_attention_heads"]
    queries, keys = num_heads // old_heads, num_kv_heads // config["num_key_value_heads"]
    grown = head_size - old_size
    pad = torch.nn.functional.pad
    for name, tensor in tensors.items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            heads = pad(tensor.unflatten(0, (-1, old_size)), (0, 0, 0, grown))
            tensor = heads.repeat_interleave(queries if kind == "q_proj" else keys, 0).flatten(0, 1)
        elif kind == "o_proj":
            heads = pad(tensor.unflatten(1, (-1, old_size)), (0, grown)) / queries
            tensor = heads.repeat_interleave(queries, 1).flatten(1, 2)
        elif kind == "q_norm":
            # The norm's factor, and the one by which the scores are now divided, cancel out.
            tensor = pad(tensor, (0, grown))
        elif kind == "k_norm":
            tensor = pad(tensor * (old_size / head_size) ** 0.5, (0, grown))
        tensors[name] = tensor
    config |= {"head_dim": head_size, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    config["rope_parameters"] |= {"partial_rotary_factor": old_size / head_size}
    return write(folder, config, tensors)


def multimodal(folder: Path) -> str:
    """LLaVA with the bundled target as its language model and a random tiny CLIP; images stand for the mask token."""
    text, tensors = bundled()
    generator = torch.Generator().manual_seed(3)
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "image_size": 16,
        "patch_size": 8,
        "projection_dim": 32,
    }
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": vision,
        "image_token_index": 1,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}

    def add(name: str, *shape: int) -> None:
        tensors[name] = torch.randn(shape, generator=generator) * 0.1

    def add_linear(name: str, outputs: int, inputs: int) -> None:
        add(f"{name}.weight", outputs, inputs)
        add(f"{name}.bias", outputs)

    def add_norm(name: str) -> None:
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = torch.ones(32), torch.zeros(32)

    tower = "vision_tower.vision_model"
    add(f"{tower}.embeddings.class_embedding", 32)
    add(f"{tower}.embeddings.patch_embedding.weight", 32, 3, 8, 8)
    add(f"{tower}.embeddings.position_embedding.weight", 5, 32)
    add_norm(f"{tower}.pre_layrnorm")
    add_norm(f"{tower}.post_layernorm")
    for i in range(2):
        layer = f"{tower}.encoder.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            add_linear(f"{layer}.self_attn.{name}", 32, 32)
        add_norm(f"{layer}.layer_norm1")
        add_norm(f"{layer}.layer_norm2")
        add_linear(f"{layer}.mlp.fc1", 64, 32)
        add_linear(f"{layer}.mlp.fc2", 32, 64)
    add_linear("multi_modal_projector.linear_1", text["hidden_size"], 32)
    add_linear("multi_modal_projector.linear_2", text["hidden_size"], text["hidden_size"])
    path = write(folder, config, tensors)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 16},
                "crop_size": {"height": 16, "width": 16},
            }
        )
    )
    (folder / "processor_config.json").write_text(
        json.dumps(
            {
                "processor_class": "LlavaProcessor",
                "patch_size": 8,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
                "image_token": "<|mask|>",
            }
        )
    )
    return path


def adapter(folder: Path, seed: int) -> str:
    """A random LoRA adapter of rank 8 for the bundled target, strong enough to change what it says."""
    _, tensors = bundled()
    generator = torch.Generator().manual_seed(seed)
    lora: Tensors = {}
    for name, weight in tensors.items():
        if name == "model.embed_tokens.weight":
            name = "lm_head.weight"
        if "_proj" in name or name.startswith("lm_head"):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            lora[f"{prefix}.lora_A.weight"] = torch.randn(8, weight.shape[1], generator=generator) * 0.05
            lora[f"{prefix}.lora_B.weight"] = torch.randn(weight.shape[0], 8, generator=generator) * 0.05
    folder.mkdir(parents=True, exist_ok=True)
    save_file(lora, folder / "adapter_model.safetensors")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
