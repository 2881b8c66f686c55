"""Tree attention on the target's layers, riding on the backend that vLLM picked for them.

The layers keep their backend's name, cache and writes. Only where a step has drafts, the verify rows are computed under
the tree's mask; every other row, and every step without drafts, is the base backend's.

A FULL CUDA graph holds the tree's kernels alone, and reads the step's trees from buffers that ``build`` fills anew
before each replay. Graphs are captured for uniform batches only, so a mixed batch never replays one. A uniform batch
without drafts may: its rows are put there as a chain, whose mask is the causal one.
"""

from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionType, CommonAttentionMetadata

from vllm_dartree.engine.commit import CachedLayer
from vllm_dartree.engine.kv_layout import KVLayout, PackedCPULayout, PagedLayout, VerifyRows
from vllm_dartree.engine.state import TreeState, TreeStep
from vllm_dartree.features import BACKENDS, PAGED_BACKENDS, DartreeConfigError
from vllm_dartree.kernels import use_triton


def _block_table(metadata: CommonAttentionMetadata, block_size: int) -> Tensor:
    """The columns in use, by the host's upper bound of the lengths."""
    return metadata.block_table_tensor[:, : -(-metadata.max_seq_len // block_size)]


def _rows_of_trees(step: TreeStep, metadata: CommonAttentionMetadata, block_size: int) -> VerifyRows:
    return VerifyRows(
        first_tokens=step.tokens[step.first_rows],
        num_rows=step.bounds.diff(),
        roots=step.roots,
        ancestors=step.topology.ancestors,
        depths=step.topology.depths,
        block_table=_block_table(metadata, block_size)[: step.roots.shape[0]],
        verify_only=step.verify_only,
    )


def _rows_of_chains(max_rows: int, metadata: CommonAttentionMetadata, block_size: int) -> VerifyRows:
    """All tokens of a batch without drafts and with at most ``max_rows`` tokens per request, a chain for each."""
    num_reqs = metadata.num_reqs
    starts, num_tokens = metadata.query_start_loc[:num_reqs].long(), metadata.query_start_loc[: num_reqs + 1].diff()
    row = torch.arange(max_rows, device=starts.device)
    return VerifyRows(
        first_tokens=starts,
        num_rows=num_tokens.clamp(max=max_rows).long(),
        roots=(metadata.seq_lens[:num_reqs] - num_tokens).clamp(min=0).long(),
        ancestors=(row <= row[:, None]).expand(num_reqs, -1, -1),
        depths=row.expand(num_reqs, -1),
        block_table=_block_table(metadata, block_size),
        verify_only=True,
    )


class _GraphRows:
    """The buffers from which captured graphs read a step's rows; one set for each metadata builder."""

    def __init__(self, max_num_reqs: int, max_rows: int, device: torch.device) -> None:
        self.first_tokens, self.num_rows, self.roots = torch.zeros(3, max_num_reqs, dtype=torch.int64, device=device)
        self.ancestors = torch.zeros(max_num_reqs, max_rows, max_rows, dtype=torch.bool, device=device)
        self.depths = torch.zeros(max_num_reqs, max_rows, dtype=torch.int64, device=device)

    def fill(self, rows: VerifyRows) -> None:
        num_reqs = rows.roots.shape[0]
        for name in ("first_tokens", "num_rows", "roots", "ancestors", "depths"):
            getattr(self, name)[:num_reqs] = getattr(rows, name)
        # Requests that pad the batch up to the graph's size.
        self.num_rows[num_reqs:] = 0

    def views(self, num_reqs: int, block_table: Tensor) -> VerifyRows:
        return VerifyRows(
            self.first_tokens[:num_reqs],
            self.num_rows[:num_reqs],
            self.roots[:num_reqs],
            self.ancestors[:num_reqs],
            self.depths[:num_reqs],
            block_table,
            verify_only=True,
        )


def tree_backend(base: type[AttentionBackend], state: TreeState) -> type[AttentionBackend]:
    """A subclass of ``base`` whose metadata carries the step's trees; ``get_name()`` stays the same."""
    base_builder = base.get_builder_cls()

    class TreeMetadataBuilder(base_builder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.graph_rows: _GraphRows | None = None
            if self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
                max_num_reqs = self.vllm_config.scheduler_config.max_num_seqs
                self.graph_rows = _GraphRows(max_num_reqs, state.budget + 1, self.device)

        @classmethod
        def get_cudagraph_support(cls, *args: Any, **kwargs: Any) -> AttentionCGSupport:
            # A graph that takes mixed batches would run the base backend on trees, or the tree on prompts.
            support = super().get_cudagraph_support(*args, **kwargs)
            return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda level: level.value)

        @classmethod
        def get_varlen_cudagraph_max_query_len(cls, *args: Any, **kwargs: Any) -> int | None:
            # vLLM asks for adaptive verification alone, which dartree refuses.
            return None

        def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
            metadata.verify_rows = None
            block_size = self.kv_cache_spec.block_size
            if state.step is not None:
                metadata.verify_rows = _rows_of_trees(state.step, common_attn_metadata, block_size)
            # A batch with a longer query never replays a graph of the tree.
            if self.graph_rows is not None and common_attn_metadata.max_query_len <= state.budget + 1:
                self.graph_rows.fill(
                    metadata.verify_rows or _rows_of_chains(state.budget + 1, common_attn_metadata, block_size)
                )
            return metadata

        def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
            metadata = super().build_for_cudagraph_capture(common_attn_metadata)
            block_table = common_attn_metadata.block_table_tensor
            metadata.verify_rows = self.graph_rows.views(common_attn_metadata.num_reqs, block_table)
            return metadata

    class TreeBackend(base):
        @staticmethod
        def get_builder_cls() -> type:
            return TreeMetadataBuilder

    TreeBackend.__qualname__ = f"Tree{base.__qualname__}"  # vLLM groups layers by it
    return TreeBackend


def tree_impl(base: type) -> type:
    """A subclass of an attention implementation that computes verify rows under their tree.

    It has one base and no state of its own, since vLLM's instances are changed to it in place.
    """

    class TreeImpl(base):
        tree_layout: KVLayout

        def forward(
            self,
            layer: torch.nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Tensor:
            rows: VerifyRows | None = getattr(attn_metadata, "verify_rows", None)
            if rows is None or not rows.verify_only:
                output = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            if rows is not None:
                self.tree_layout.attend(
                    query.view(-1, self.num_heads, self.head_size),
                    kv_cache,
                    output.view(-1, self.num_heads, self.head_size),
                    rows,
                    self.scale,
                    _window_of(self),
                    self.logits_soft_cap or None,
                )
            return output

        def fused_output_quant_supported(self, *args: Any, **kwargs: Any) -> bool:
            # The tree's kernels write the output as it is.
            return False

    TreeImpl.__name__ = f"Tree{base.__name__}"
    return TreeImpl


def _window_of(impl: Any) -> int | None:
    """Positions that a row sees, itself included: CPU_ATTN keeps their number, the others what lies (left, right)."""
    window = impl.sliding_window
    if isinstance(window, tuple):
        window = window[0] + 1
    return window if window and window > 0 else None


def _layout_of(layer: Attention, device: torch.device) -> KVLayout:
    name = layer.attn_backend.get_name()
    if name in PAGED_BACKENDS:
        return PagedLayout(use_triton(device), envs.VLLM_BATCH_INVARIANT)
    if name == "CPU_ATTN":
        return PackedCPULayout(layer)
    raise DartreeConfigError(
        f"vLLM chose the attention backend {name}, on which method 'dartree' cannot verify trees; it works with "
        f"{', '.join(BACKENDS)}. Choose one with --attention-backend"
    )


def install_tree_attention(vllm_config: VllmConfig, draft_layer_names: set[str], state: TreeState) -> list[CachedLayer]:
    """Makes all attention layers but the drafter's able to verify trees.

    Must run after the models are loaded and before vLLM groups layers by backend (``init_attn_backend``), so that
    target and drafter get metadata builders of their own.

    Raises:
        DartreeConfigError: a layer has a feature that tree attention does not compute.
    """
    cached: list[CachedLayer] = []
    backends: dict[type, type] = {}
    impls: dict[type, type] = {}
    for name, layer in get_layers_from_vllm_config(vllm_config, Attention).items():
        if name in draft_layer_names:
            continue
        impl, base = layer.impl, layer.attn_backend
        for feature, present in (
            # Verify-only steps leave out the base's forward.
            ("a backend that writes its cache within forward", base.forward_includes_kv_cache_update),
            ("ALiBi", getattr(impl, "alibi_slopes", None) is not None),
            ("attention sinks", getattr(impl, "sinks", None) is not None),
            ("a quantised KV cache", layer.kv_cache_dtype not in ("auto", "float16", "bfloat16")),
            ("cross-layer KV sharing", layer.kv_sharing_target_layer_name is not None),
            ("chunked local attention", getattr(impl, "chunk_lookback", -1) != -1),
            ("reference sliding window attention", vllm_config.model_config.rswa_window is not None),
            ("values of another size than its keys", getattr(layer, "head_size_v", layer.head_size) != layer.head_size),
            (f"attention of type {layer.attn_type!r}", layer.attn_type != AttentionType.DECODER),
        ):
            if present:
                raise DartreeConfigError(
                    f"layer {name} of the target has {feature}, which tree attention cannot verify"
                )
        layout = _layout_of(layer, state.parents.device)
        if base not in backends:
            backends[base] = tree_backend(base, state)
        if type(impl) not in impls:
            impls[type(impl)] = tree_impl(type(impl))
        layer.attn_backend, impl.__class__ = backends[base], impls[type(impl)]
        impl.tree_layout = layout
        cached.append(CachedLayer(name, layer, layout))
    return cached
