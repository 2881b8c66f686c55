"""The block drafter (DFlash layout) in plain PyTorch, for training and for the reference decoder.

One non-causal forward over ``[anchor, mask, mask, ...]`` attends to keys and values that are projected from the
target's hidden states of the context. Modules are named as public checkpoints and vLLM's ``qwen3_dflash.py`` name
their tensors, so that a checkpoint loads by its own names. Embedding and LM head are the target's.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from vllm_dartree.heads.spec import DrafterSpec

ContextKV = list[tuple[Tensor, Tensor]]  # per layer: keys and values, [R, num_kv_heads, T, head_dim]


def _rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)


class _BlockAttention(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        return _rope(keys, cos, sin), self._heads(self.v_proj(x)).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], mask: Tensor | None):
        queries = _rope(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2), cos, sin)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, self.keys_values(x, cos, sin), strict=True))
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class _BlockConv(nn.Module):
    """DFlash2's convolution over the rows of a block, before (0) and after (1) an attention or an MLP.

    Tap ``t`` multiplies the row ``t`` before by ``base_kernel[side, t]`` plus a coefficient of its group of channels,
    which is a function of the row that comes out.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.group_size = taps, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * hidden_size // group_size, bias=False)

    def coefficients(self, x: Tensor) -> Tensor:  # [R, Q, H] to [R, Q, 2, taps, H]
        of_groups = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return of_groups.repeat_interleave(self.group_size, dim=-1) + self.base_kernel

    def forward(self, x: Tensor, coefficients: Tensor) -> Tensor:
        """``[R, Q, H]`` to the same, with the coefficients of one side, ``[R, Q, taps, H]``."""
        rows = x.shape[1]
        shifted = [F.pad(x, (0, 0, tap, 0))[:, :rows] for tap in range(self.taps)]
        return (torch.stack(shifted, dim=2) * coefficients).sum(2)


class _BlockLayer(nn.Module):
    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        conv = getattr(config, "dflash_config", None) or {}
        if taps := conv.get("conv_kernel_size"):
            self.attention_conv = _BlockConv(config.hidden_size, taps, conv["conv_group_size"])
            self.mlp_conv = _BlockConv(config.hidden_size, taps, conv["conv_group_size"])
        self.self_attn = _BlockAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, context: tuple[Tensor, Tensor], mask: Tensor | None):
        def attend(rows: Tensor) -> Tensor:
            return self.self_attn(rows, cos, sin, context, mask)

        x = x + self._between_convs("attention_conv", attend, self.input_layernorm(x))
        return x + self._between_convs("mlp_conv", self.mlp, self.post_attention_layernorm(x))

    def _between_convs(self, name: str, inner: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not hasattr(self, name):
            return inner(x)
        conv = getattr(self, name)
        before, after = conv.coefficients(x).unbind(2)
        return conv(inner(conv(x, before)), after)


class _MarkovHead(nn.Module):
    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)


class _Selector(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)


class BlockDrafter(nn.Module):
    """Backbone and head weights of one drafter checkpoint.

    Args:
        config: the backbone's shape, a Qwen3 config.
        spec: the block and the head; the head's tensors are ``prefix_gru`` and ``embed_proj`` (Domino),
            ``markov_head`` (Markov) or ``candidate_selector`` (DFlash2), and absent for a plain DFlash drafter.
        gru_bias: whether ``prefix_gru`` has biases; public Domino checkpoints have none.
    """

    def __init__(self, config: Qwen3Config, spec: DrafterSpec, *, gru_bias: bool = False) -> None:
        super().__init__()
        self.config, self.spec = config, spec
        hidden = config.hidden_size
        self.fc = nn.Linear(hidden * len(spec.target_layer_ids), hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(_BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        if spec.head == "domino":
            self.prefix_gru = nn.GRU(hidden, spec.gru_hidden_dim, bias=gru_bias, batch_first=True)
            self.embed_proj = nn.Sequential(
                nn.Linear(hidden + spec.gru_hidden_dim, spec.emb_dim, bias=False),
                nn.SiLU(),
                nn.Linear(spec.emb_dim, config.vocab_size, bias=False),
            )
        elif spec.head == "markov":
            self.markov_head = _MarkovHead(config.vocab_size, spec.markov_rank)
        elif spec.head == "selector":
            self.candidate_selector = _Selector(config.vocab_size, hidden, spec.selector_rank)

    def context_kv(self, features: Tensor, positions: Tensor) -> ContextKV:
        """Projects the target's features of context tokens to keys and values of every layer.

        Args:
            features: ``[R, T, num_target_layers * H]``, the hidden states of ``spec.target_layer_ids`` side by side.
            positions: ``[R, T]`` int64.
        """
        context = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary(context, positions)
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.layers]

    def forward(self, embeds: Tensor, positions: Tensor, context: ContextKV, mask: Tensor | None = None) -> Tensor:
        """Hidden states of the block's rows, ``[R, Q, H]``, after the final norm.

        Args:
            embeds: ``[R, Q, H]``, the target's embeddings of ``[anchor, mask, mask, ...]``.
            positions: ``[R, Q]`` int64; the anchor's is the number of context tokens.
            context: what ``context_kv`` returned, ``T`` tokens.
            mask: bool ``[R, 1, Q, T + Q]``, true where a row may look; None lets every row see all.
        """
        cos, sin = self.rotary(embeds, positions)
        for layer, layer_context in zip(self.layers, context, strict=True):
            embeds = layer(embeds, cos, sin, layer_context, mask)
        return self.norm(embeds)
