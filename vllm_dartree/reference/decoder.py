"""Batch-1 decoding with any system: draft, tree, verify, accept, commit.

This is the algorithm in METHOD's order, on ``transformers``, for comparisons and as the oracle of the engine. It reads
the device between the stages to time them, and is not meant to be fast.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vllm_dartree.reference.checkpoint import Drafter, Target
from vllm_dartree.reference.kv_cache import TreeCache
from vllm_dartree.reference.systems import (
    SYSTEMS,
    Draft,
    HitRates,
    Proposal,
    empty_tree,
    next_slot_guesses,
    propose,
)
from vllm_dartree.tree import DraftTree, TreeConfig, topology, walk


def choose(logits: Tensor, positions: list[int], temperature: float, seed: int) -> Tensor:
    """The target's token of every row: the argmax, or a sample at ``temperature > 0``.

    A sample's noise depends on the seed and the row's position alone (Gumbel-max), so any two rows that share a
    position and a prefix choose alike: decoding with any tree gives the very tokens of decoding without.

    Args:
        logits: ``[N, V]``.
        positions: of the ``N`` rows.

    Returns:
        ``[N]`` int64.
    """
    if temperature == 0:
        return logits.argmax(-1)
    noise: dict[int, Tensor] = {}
    generator = torch.Generator(logits.device)
    for position in set(positions):
        # A digest, since a CPU's generator takes the low 32 bits of its seed alone.
        digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
        generator.manual_seed(int.from_bytes(digest))
        noise[position] = torch.empty(logits.shape[-1], device=logits.device).exponential_(generator=generator)
    exponential = torch.stack([noise[position] for position in positions])
    return (logits.float() / temperature - exponential.clamp(min=1e-30).log()).argmax(-1)


@dataclass
class Round:
    """One verify round: what was proposed, and what came of it."""

    tree: DraftTree
    path: list[int]  # rows of the accepted path, first the anchor's 0
    emitted: list[int]  # accepted tokens and the target's own one behind them
    guesses: list[int]  # first choices for the slots along the path, see ``next_slot_guesses``


@dataclass
class Generation:
    """What one prompt gave. ``seconds`` and ``stages`` leave out the prefill, which is the same for all systems."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds by stage

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


class ReferenceDecoder:
    """Decodes one request at a time with one system.

    Args:
        target: the target model.
        drafter: the drafter; None for ``ar``.
        system: a name in ``SYSTEMS``.
        config: knobs of the tree.
        temperature: 0 is greedy.
        seed: of the samples at ``temperature > 0``.

    Raises:
        ValueError: the system needs another head than the drafter has.
        TreeConfigError: its variant cannot grow a tree with these knobs.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        system: str,
        config: TreeConfig | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.target, self.drafter, self.system = target, drafter, SYSTEMS[system]
        self.config, self.temperature, self.seed = config or TreeConfig(), temperature, seed
        if drafter is not None:
            # A drafter that looks at a few candidates of a slot has no more of them to give.
            known = drafter.spec.top_k or self.config.candidates
            candidates, width = min(self.config.candidates, known), min(self.config.width, known)
            self.config = replace(self.config, candidates=candidates, width=width)
        if self.system.propose is not None:
            if drafter is None:
                raise ValueError(f"method '{system}' needs a drafter")
            if self.system.needs not in (None, drafter.spec.head):
                raise ValueError(
                    f"method '{system}' needs a drafter with a {self.system.needs} head, "
                    f"but this one has a {drafter.spec.head} head"
                )
        if self.system.variant is not None:
            self.config = replace(self.config, variant=self.system.variant)
            self.config.widths(drafter.spec.num_slots)
        self.device = target.model.device
        self._features: dict[int, Tensor] = {}

    @contextmanager
    def _capture_features(self) -> Iterator[None]:
        """Records the outputs of the layers that the drafter reads during forwards of the target."""
        ids = self.drafter.spec.target_layer_ids if self.drafter else ()

        def record(layer_id: int):
            def hook(module, args, output) -> None:
                self._features[layer_id] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [self.target.layers[i].register_forward_hook(record(i)) for i in ids]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _forward(self, tokens: Tensor, positions: Tensor, ancestors: Tensor, cache: TreeCache) -> Tensor:
        """Logits ``[N, V]`` of rows that see the context and their ancestors."""
        output = self.target.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=cache.tree_mask(ancestors),
            past_key_values=cache,
            use_cache=True,
        )
        return output.logits[0]

    def _append_context(self, rows: Tensor, context: TreeCache) -> None:
        """Projects the features of committed rows into the drafter's context."""
        features = torch.cat([self._features[i][:, rows] for i in self.drafter.spec.target_layer_ids], dim=-1)
        start = context.committed
        positions = torch.arange(start, start + rows.shape[0], device=self.device)[None]
        context_kv = self.drafter.model.context_kv(features, positions)
        for layer, (keys, values) in zip(context.layers, context_kv, strict=True):
            layer.update(keys, values)
        context.commit(torch.arange(rows.shape[0], device=self.device))

    def _draft(self, anchor: int, context: TreeCache) -> Draft:
        spec = self.drafter.spec
        block = torch.full((1, spec.num_query_rows), spec.mask_token_id, device=self.device)
        block[0, 0] = anchor
        positions = torch.arange(context.committed, context.committed + block.shape[1], device=self.device)[None]
        context_kv = [layer.filled_rows() for layer in context.layers]
        hidden = self.drafter.model(self.target.embedding(block), positions, context_kv)[:, spec.first_slot_row :]
        logits = self.target.lm_head(hidden) * spec.logit_scale
        return Draft(block[:, 0], hidden, logits)

    @contextmanager
    def _timed(self, stages: dict[str, float], name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        stages[name] += time.perf_counter() - start

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_new_tokens: int) -> Generation:
        """Continues ``prompt`` until an end token or ``max_new_tokens``.

        Raises:
            ValueError: the prompt is empty or does not leave room in the target's ``max_position_embeddings``.
        """
        limit = self.target.model.config.get_text_config().max_position_embeddings
        if not prompt or len(prompt) + max_new_tokens > limit:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new tokens do not fit: "
                f"the prompt must have at least one token, and both together at most {limit}"
            )
        rows = self.config.budget + 1
        cache = TreeCache(len(self.target.layers), len(prompt) + max_new_tokens + rows)
        context = TreeCache(len(self.drafter.model.layers), cache.layers[0].capacity) if self.drafter else None
        generation = Generation()
        with self._capture_features():
            anchor = self._prefill(prompt, cache, context)
            generation.tokens.append(anchor)
            while len(generation.tokens) < max_new_tokens and generation.tokens[-1] not in self.target.end_token_ids:
                done = self._round(generation, anchor, cache, context)
                anchor = done.emitted[-1]
                kept = done.emitted[: max_new_tokens - len(generation.tokens)]
                ends = [i for i, token in enumerate(kept) if token in self.target.end_token_ids]
                generation.tokens += kept[: ends[0] + 1] if ends else kept
        return generation

    def _prefill(self, prompt: list[int], cache: TreeCache, context: TreeCache | None) -> int:
        tokens = torch.tensor(prompt, device=self.device)
        positions = torch.arange(len(prompt), device=self.device)
        causal = positions[:, None] >= positions
        logits = self._forward(tokens, positions, causal, cache)
        cache.commit(positions)
        if context is not None:
            self._append_context(positions, context)
        return int(choose(logits[-1:], [len(prompt) - 1], self.temperature, self.seed))

    def _round(self, generation: Generation, anchor: int, cache: TreeCache, context: TreeCache | None) -> Round:
        stages = generation.stages
        proposal: Proposal | None = None
        if self.system.propose is not None:
            with self._timed(stages, "draft"):
                draft = self._draft(anchor, context)
            with self._timed(stages, "tree"):
                proposal = propose(self.system, draft, self.drafter.head, self.config)
        with self._timed(stages, "tree"):
            tree = _without_dead_nodes(proposal.tree) if proposal else empty_tree(self.device)
            shape = topology(tree.parents)
        with self._timed(stages, "verify"):
            tokens = torch.cat([tree.tokens.new_tensor([anchor]), tree.tokens[0]])
            positions = cache.committed + shape.depths[0]
            logits = self._forward(tokens, positions, shape.ancestors[0], cache)
            chosen = choose(logits, positions.tolist(), self.temperature, self.seed)[None]
        with self._timed(stages, "commit"):
            accepted = walk(tree.tokens, tree.parents, shape, chosen, max_depth=tree.tokens.shape[1])
            length = int(accepted.num_accepted) + 1
            path = accepted.path[0, :length]
            cache.commit(path)
            if context is not None:
                self._append_context(path, context)
        emitted = accepted.tokens[0, :length].tolist()
        # For the statistics only, hence outside of the timed stages.
        guesses = next_slot_guesses(proposal, emitted[:-1]) if proposal else []
        generation.rounds.append(Round(tree, path.tolist(), emitted, guesses))
        return generation.rounds[-1]


def _without_dead_nodes(tree: DraftTree) -> DraftTree:
    live = int((tree.parents >= 0).sum())
    return DraftTree(tree.tokens[:, : live - 1], tree.parents[:, :live], tree.scores[:, : live - 1])


@dataclass
class Summary:
    """Figures of one system over many prompts, as in METHOD: ``tau`` is emitted tokens per verify round."""

    tokens: int
    rounds: int
    tau: float
    accept_by_depth: list[float]
    hit_rates: HitRates
    seconds: float
    tokens_per_second: float
    stage_ms: dict[str, float]

    @classmethod
    def of(cls, generations: list[Generation]) -> "Summary":
        """The first token of every prompt comes from the prefill, so that it counts for no round."""
        rounds = [done for generation in generations for done in generation.rounds]
        tokens = sum(len(generation.tokens) for generation in generations)
        from_rounds = tokens - len(generations)
        seconds = sum(generation.seconds for generation in generations)
        depths = [len(done.path) - 1 for done in rounds]
        hits = HitRates()
        for done in rounds:
            hits.add(done.guesses, done.emitted)
        count = max(len(rounds), 1)
        return cls(
            tokens=tokens,
            rounds=len(rounds),
            tau=from_rounds / count,
            accept_by_depth=[sum(d >= depth for d in depths) / count for depth in range(1, max(depths, default=0) + 1)],
            hit_rates=hits,
            seconds=seconds,
            tokens_per_second=from_rounds / seconds if seconds else 0.0,
            stage_ms={
                stage: 1000 * sum(generation.stages.get(stage, 0.0) for generation in generations) / count
                for stage in ("draft", "tree", "verify", "commit")
            },
        )
