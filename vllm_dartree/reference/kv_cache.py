"""The one KV cache of the reference decoder: append a tree, verify it under a mask, keep the accepted path."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values, ``[1, num_kv_heads, capacity, head_dim]``: committed tokens, then tree rows."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.committed = self.filled = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, heads, _, head_dim = key_states.shape
        self.keys = key_states.new_empty(1, heads, self.capacity, head_dim)
        self.values = value_states.new_empty(1, heads, self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Appends rows ``[1, num_kv_heads, n, head_dim]`` and returns views of all that is filled."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.filled = self.filled, self.filled + key_states.shape[2]
        self.keys[:, :, start : self.filled] = key_states
        self.values[:, :, start : self.filled] = value_states
        return self.filled_rows()

    def filled_rows(self) -> tuple[Tensor, Tensor]:
        """Views of the keys and values of all committed and appended rows."""
        return self.keys[:, :, : self.filled], self.values[:, :, : self.filled]

    def commit(self, rows: Tensor) -> None:
        """Keeps the appended rows ``rows`` (``[n]`` int64, counted from the first uncommitted one) and drops the rest.

        Kept rows may move left over each other; indexing reads them all before the first is written.
        """
        end = self.committed + rows.shape[0]
        for buffer in (self.keys, self.values):
            buffer[:, :, self.committed : end] = buffer[:, :, self.committed + rows]
        self.committed = self.filled = end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_seq_length(self) -> int:
        return self.filled

    def get_max_length(self) -> int:
        return self.capacity


class TreeCache(Cache):
    """A ``TreeCacheLayer`` per layer, in the form that ``transformers`` models take as ``past_key_values``.

    Args:
        num_layers: layers of the model.
        capacity: most tokens and tree rows at any time.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        super().__init__(layers=[TreeCacheLayer(capacity) for _ in range(num_layers)])

    @property
    def committed(self) -> int:
        """Number of context tokens."""
        return self.layers[0].committed

    def commit(self, rows: Tensor) -> None:
        """See ``TreeCacheLayer.commit``."""
        for layer in self.layers:
            layer.commit(rows)

    def tree_mask(self, ancestors: Tensor) -> Tensor:
        """Bool ``[1, 1, N, committed + N]``: a row sees the context, itself and its ancestors (``[N, N]`` bool)."""
        context = ancestors.new_ones(ancestors.shape[0], self.committed)
        return torch.cat([context, ancestors], dim=1)[None, None]
