"""``{"method": "dartree", ...}``: the user's keys, checked, and the config object that travels through vLLM.

What a user can get wrong is refused here, before any memory is taken: in ``create_speculative_config`` while vLLM makes
its config, in the process that the command runs in, and by ``features`` for what only the finished config tells.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig
from vllm.config import SpeculativeConfig
from vllm.config.utils import config
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP
from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule

from vllm_dartree.budget import batch_size_schedule
from vllm_dartree.engine import draft_models
from vllm_dartree.features import DartreeConfigError, check_features, check_runner, early_view
from vllm_dartree.heads import DrafterSpec
from vllm_dartree.tree import TreeConfig, TreeConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_dartree.engine.draft_models import DraftModel

logger = logging.getLogger("vllm.dartree")  # below "vllm", so that vLLM's handlers and level apply

METHOD = "dartree"
# Key of --speculative-config: field of TreeConfig.
TREE_KEYS = {
    "num_speculative_tokens": "budget",
    "tree_width": "width",
    "tree_candidates": "candidates",
    "tree_depth": "depth",
    "tree_depth_bonus": "depth_bonus",
    "tree_variant": "variant",
}
# How the budget follows the load; not a knob of the tree, which is cut to it.
BUDGET_KEY, BUDGET_MODES = "tree_budget", ("fixed", "auto")
# Fields of EngineArgs that stand for a key: --spec-method, --spec-model, --spec-tokens.
ALIASES = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
# Keys of the tree that a variant has no use for.
UNUSED_TREE_KEYS = {"fixed": ("tree_width",), "chain": ("tree_width", "tree_depth_bonus")}
# vLLM's keys that mean nothing to this method; False and null ask for nothing and are let through.
FOREIGN_KEYS = re.compile(
    r"prompt_lookup_\w+|suffix_decoding_\w+|synthetic_\w+|fly_\w+|xpress_topc|draft_lm_head_quantization"
    r"|index_share_for_mtp_iteration|use_heterogeneous_vocab|use_local_argmax_reduction|enable_adaptive_verification"
    r"|parallel_drafting|disable_padded_drafter_batch|disable_eagle_block_drop|max_model_len"
)
# Keys that vLLM fills in itself.
INTERNAL_KEYS = ("target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config")
# For these kinds of RoPE a larger ``max_position_embeddings`` only makes vLLM's table of angles longer.
PLAIN_ROPE = ("default", "linear", "llama3", "ntk", "proportional")


@config
class DartreeSpeculativeConfig(SpeculativeConfig):
    """vLLM's speculative config with the tree's knobs. ``method`` stays the native one of the drafter, so that hidden
    states, KV groups and lookahead are set up as vLLM does for it."""

    tree: Any = None
    """The knobs of the tree, a ``TreeConfig``."""
    drafter: Any = None
    """The block and the head of the drafter, a ``DrafterSpec``."""
    has_custom_processors: bool = False
    """Whether the engine runs logits processors that are not vLLM's own; requests that they take are chains."""
    auto_budget: bool = False
    """Whether the scheduler chooses the budget by load, up to ``num_speculative_tokens``."""

    def __repr__(self) -> str:
        # As short as vLLM's own, which prints its whole config at start.
        return f"DartreeSpeculativeConfig(model={self.model!r}, tree={self.tree}, drafter={self.drafter})"

    @property
    def is_dartree(self) -> bool:
        """Tells this config from vLLM's own, which lacks the attribute, without an import of this module."""
        return True

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Input rows of one drafter forward besides the request's own first one.

        vLLM counts ``B``, or 0 where it bounds the number of requests by ``num_lookahead_tokens`` instead; the
        drafter's block has ``L`` slots, whatever the budget.
        """
        of_two = copy.copy(self)
        of_two.num_speculative_tokens = 2  # with a budget of 1, DSpark's count would be 0 either way
        is_counted = super(DartreeSpeculativeConfig, of_two).max_num_new_slots_for_drafting > 0
        return self.num_lookahead_tokens - 1 if is_counted else 0

    @property
    def num_lookahead_tokens(self) -> int:
        """Cache slots that one drafter forward writes behind the verified rows; ``VllmConfig`` asks for it.

        vLLM's own rule is ``B + 1``. With a budget below the block's length the drafter would write beyond the blocks
        that the request owns.
        """
        return self.drafter.num_query_rows

    def use_eagle_block_drop(self) -> bool:
        """Whether a hit in the prefix cache gives back its last block, so that the drafter sees it computed again.

        EAGLE's drafters need that, since their KV depends on the next token; a block drafter's depends on the target's
        features alone, and vLLM 0.33 says so for dflash too.
        """
        return False


def given_keys(args: EngineArgs) -> dict[str, Any]:
    """The keys of ``speculative_config`` with those of its aliases, ``--spec-model`` and so on.

    Raises:
        DartreeConfigError: a key is given twice.
    """
    keys: dict[str, Any] = {}
    for key, value in (args.speculative_config or {}).items():
        name = str(key).replace("-", "_")
        if name in keys:
            raise DartreeConfigError(f"speculative_config has the key {name!r} twice, with '-' and with '_'; keep one")
        keys[name] = value
    for alias, name in ALIASES.items():
        value = getattr(args, alias, None)
        if value is None:
            continue
        if name in keys:
            raise DartreeConfigError(f"speculative_config[{name!r}] and {alias} are both given; leave one of them out")
        keys[name] = value
    return keys


def tree_config(keys: Mapping[str, Any]) -> TreeConfig:
    """The knobs of the tree out of a user's keys.

    Raises:
        DartreeConfigError: a value cannot work; in the words of the user's keys.
    """
    given = {key: keys[key] for key in TREE_KEYS if keys.get(key) is not None}
    with _users_words():
        tree = TreeConfig(**{TREE_KEYS[key]: value for key, value in given.items()})
    for key in UNUSED_TREE_KEYS.get(tree.variant, ()):
        if key in given:
            raise DartreeConfigError(
                f"{key} is {given[key]!r}, but tree_variant is {tree.variant!r}, which does not use it; leave one of "
                "them out"
            )
    return tree


@contextmanager
def _users_words() -> Iterator[None]:
    """Turns a ``TreeConfigError``, which speaks of TreeConfig's fields, into one that speaks of the user's keys."""
    try:
        yield
    except TreeConfigError as error:
        raise DartreeConfigError(error.in_words_of({field: key for key, field in TREE_KEYS.items()})) from None


def _check_keys(keys: Mapping[str, Any]) -> None:
    fields = {field.name for field in dataclasses.fields(SpeculativeConfig)}.difference(INTERNAL_KEYS)
    for key, value in keys.items():
        if key not in fields and key not in (*TREE_KEYS, BUDGET_KEY):
            near = difflib.get_close_matches(key, [*TREE_KEYS, BUDGET_KEY, *fields], 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise DartreeConfigError(
                f"speculative_config has the unknown key {key!r}; {hint}method 'dartree' knows "
                f"{', '.join(TREE_KEYS)}, {BUDGET_KEY} and vLLM's own keys for a drafter"
            )
        if FOREIGN_KEYS.fullmatch(key) and value not in (None, False):
            raise DartreeConfigError(f"{key} is {value!r}, but method 'dartree' has no use for it; leave it out")
    if not isinstance(keys.get("model"), str | None):
        raise DartreeConfigError(f"model is {keys['model']!r}; it must be the drafter's folder or name on the hub")
    if not keys.get("model"):
        raise DartreeConfigError(
            "speculative_config has no 'model'; method 'dartree' needs the drafter's checkpoint there, a folder or a "
            "name on the hub"
        )
    for key, allowed in (("draft_sample_method", "greedy"), ("rejection_sample_method", "standard")):
        if keys.get(key) not in (None, allowed):
            raise DartreeConfigError(
                f"{key} is {keys[key]!r}, but method 'dartree' works with {allowed!r} only; leave it out"
            )


def _check_schedule(schedule: Any, budget: int) -> None:
    """Refuses a ``num_speculative_tokens_per_batch_size`` that vLLM would refuse later, or not follow."""
    try:
        ranges = validate_and_normalize_dynamic_sd_schedule(schedule)
    except (TypeError, ValueError) as error:
        raise DartreeConfigError(
            f"num_speculative_tokens_per_batch_size is {schedule!r}: {error} It must list ranges of batch sizes with "
            "their budgets, [[first, last, nodes], ...], from 1 upwards"
        ) from None
    for _, last, nodes in ranges:
        if nodes > budget:
            raise DartreeConfigError(
                f"num_speculative_tokens_per_batch_size has {nodes} nodes for batches of up to {last}, but "
                f"num_speculative_tokens is {budget}; lower the one or raise the other"
            )


def _auto_budget(keys: Mapping[str, Any], parallel: ParallelConfig) -> bool:
    """Whether the user wants the budget to follow the load."""
    mode = BUDGET_MODES[0] if keys.get(BUDGET_KEY) is None else keys[BUDGET_KEY]
    if mode not in BUDGET_MODES:
        raise DartreeConfigError(f"{BUDGET_KEY} is {mode!r}; it must be one of {', '.join(map(repr, BUDGET_MODES))}")
    if mode == "fixed":
        return False
    if keys.get("num_speculative_tokens_per_batch_size") is not None:
        raise DartreeConfigError(
            f"{BUDGET_KEY} is 'auto', but num_speculative_tokens_per_batch_size is given too; leave one of them out"
        )
    if parallel.data_parallel_size > 1:
        raise DartreeConfigError(
            f"{BUDGET_KEY} is 'auto', but data_parallel_size is {parallel.data_parallel_size}: all ranks must verify "
            "equally many nodes, and each would choose its own number; leave one of them out"
        )
    return True


def create_speculative_config(
    args: EngineArgs, native: Callable, target_model_config: ModelConfig, target_parallel_config: ParallelConfig
) -> DartreeSpeculativeConfig:
    """What ``EngineArgs.create_speculative_config`` returns for this method.

    Args:
        args: asks for this method; it is left as it was, so that it can be used again.
        native: vLLM's own ``create_speculative_config``, which validates all keys but ours.

    Raises:
        DartreeConfigError, DrafterConfigError: naming the key or the feature, its value and what is allowed.
    """
    keys = given_keys(args)
    _check_keys(keys)
    tree = tree_config(keys)
    auto_budget = _auto_budget(keys, target_parallel_config)
    if (schedule := keys.get("num_speculative_tokens_per_batch_size")) is not None:
        _check_schedule(schedule, tree.budget)
    check_runner()
    check_features(early_view(args, target_model_config, target_parallel_config))
    if target_parallel_config.worker_cls not in ("auto", worker_class()):
        raise DartreeConfigError(
            f"worker_cls is {target_parallel_config.worker_cls!r}, but method 'dartree' brings its own worker; leave "
            "worker_cls out"
        )
    ranks = target_parallel_config.tensor_parallel_size
    if keys.get("draft_tensor_parallel_size") not in (None, ranks):
        raise DartreeConfigError(
            f"draft_tensor_parallel_size is {keys['draft_tensor_parallel_size']!r}, but the drafter runs on the "
            f"target's ranks, of which there are {ranks}; leave it out"
        )

    raw, spec = _read_drafter(keys, getattr(args, "hf_token", None))
    kind = draft_models.kind_of(spec)
    if spec.top_k is not None:
        tree = _within_top_k(tree, keys, spec.top_k)
    with _users_words():
        widths = tree.widths(spec.num_slots)

    # On a copy: rewritten for good, a second call would silently make plain dflash of it.
    rewritten = copy.copy(args)
    rewritten.speculative_config = {key: value for key, value in keys.items() if key not in (*TREE_KEYS, BUDGET_KEY)}
    rewritten.speculative_config |= {"method": kind.method, "num_speculative_tokens": tree.budget}
    rewritten.speculative_config |= kind.native_keys(tree.candidates)
    for alias in ALIASES:
        setattr(rewritten, alias, None)
    # Before vLLM sees it, who would speak of the key that it is handed on as.
    vocabulary = raw.get("draft_vocab_size") or target_model_config.hf_text_config.vocab_size
    if tree.candidates > vocabulary:
        is_top_k = keys.get("tree_candidates") is None and keys.get(kind.top_k_key) is not None
        key = kind.top_k_key if is_top_k else "tree_candidates"
        raise DartreeConfigError(
            f"{key} is {tree.candidates}, but the vocabulary has {vocabulary} tokens; it must be at most that"
        )
    base = native(rewritten, target_model_config, target_parallel_config)

    _check_fit(keys["model"], spec, base.draft_model_config.hf_config, target_model_config)
    if tree.budget > sum(widths):
        tree = _fit_budget(tree, sum(widths), is_given=keys.get("num_speculative_tokens") is not None)
        base.num_speculative_tokens = tree.budget

    if auto_budget:
        base.num_speculative_tokens_per_batch_size = batch_size_schedule(tree.budget)
    _hand_over(base, kind)
    target_parallel_config.worker_cls = worker_class()
    made = object.__new__(DartreeSpeculativeConfig)
    # copy.copy and not vLLM's replace, which would validate the parts once more.
    made.__dict__.update(
        copy.copy(base).__dict__,
        tree=tree,
        drafter=spec,
        auto_budget=auto_budget,
        has_custom_processors=bool(target_model_config.logits_processors or entry_points(group=LOGITSPROCS_GROUP)),
    )
    return made


def _within_top_k(tree: TreeConfig, keys: Mapping[str, Any], top_k: int) -> TreeConfig:
    """The tree of a drafter that looks at ``top_k`` candidates of a slot: K and W default to what there is.

    Raises:
        DartreeConfigError: more of them are asked for.
    """
    candidates = tree.candidates if keys.get("tree_candidates") is not None else top_k
    if candidates > top_k:
        raise DartreeConfigError(
            f"tree_candidates is {candidates}, but this drafter looks at the {top_k} best candidates of a slot alone; "
            "it must be at most that"
        )
    width = tree.width if keys.get("tree_width") is not None else min(tree.width, candidates)
    with _users_words():
        return dataclasses.replace(tree, candidates=candidates, width=width)


def _hand_over(base: SpeculativeConfig, kind: type[DraftModel]) -> None:
    """Makes vLLM load the drafter as our model, where that is not vLLM's own."""
    hf = base.draft_model_config.hf_config
    nested = getattr(hf, "dflash_config", None) or {}
    if nested.get("sample_from_anchor"):
        # vLLM's speculator refuses it; ours lays the block out by the DrafterSpec, which has read it.
        hf.dflash_config = nested | {"sample_from_anchor": False}
    if kind.vllm_model is not None:
        hf.architectures = [kind.registered_name()]
        base.update_arch_()


def _fit_budget(tree: TreeConfig, num_nodes: int, *, is_given: bool) -> TreeConfig:
    """The budget shrinks to the nodes that there can be, with a warning if it was asked for."""
    if is_given:
        logger.warning(
            "num_speculative_tokens is %d, but a tree has at most %d nodes here (tree_variant is %r), so as many are "
            "verified",
            tree.budget,
            num_nodes,
            tree.variant,
        )
    return dataclasses.replace(tree, budget=num_nodes)


def _read_drafter(keys: Mapping[str, Any], hub_token: Any) -> tuple[dict[str, Any], DrafterSpec]:
    """The drafter's ``config.json`` and what it says about block and head.

    Before vLLM reads it, whose answer to a checkpoint that is no drafter is a list of all that it knows.
    """
    name = keys["model"]
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name, revision=keys.get("revision"), token=hub_token)
    except (OSError, ValueError) as error:
        raise DartreeConfigError(
            f"speculative_config has model={name!r}, but there is no config.json of a checkpoint to be had: {error}"
        ) from error
    raw = _without_speculators_format(raw)
    reason = draft_models.refusal(raw)
    if reason is not None:
        raise DartreeConfigError(f"the drafter '{name}' has {reason}")
    spec = DrafterSpec.from_config(raw)
    kind = draft_models.kind_of(spec)
    if not set(raw["architectures"]).intersection(kind.architectures):
        raise DartreeConfigError(
            f"the drafter '{name}' has a {spec.head} head, which belongs to architectures "
            f"{' or '.join(kind.architectures)}, but architectures={raw['architectures']}"
        )
    for other in draft_models.KINDS:
        top_k = keys.get(other.top_k_key)
        if top_k is None:
            continue
        if other is not kind:
            raise DartreeConfigError(
                f"{other.top_k_key} is {top_k!r}, but it belongs to {other.name} drafters and '{name}' is a "
                f"{kind.name} one; leave it out"
            )
        if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
            raise DartreeConfigError(f"{other.top_k_key} is {top_k!r}, but it must be an integer >= 1")
        spec = dataclasses.replace(spec, top_k=top_k)
    return raw, spec


def _without_speculators_format(raw: dict[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint in the format of the library *speculators* as vLLM reads it; others as they are."""
    if "speculators_model_type" not in raw:
        return raw
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    return {"block_size": raw.get("block_size")} | SpeculatorsConfig.extract_transformers_pre_trained_config(raw)


def _check_fit(name: str, spec: DrafterSpec, hf: PreTrainedConfig, target: ModelConfig) -> None:
    """Refuses a drafter that does not fit the target.

    Args:
        name: of the drafter's checkpoint, for messages.
        spec: its block and head.
        hf: its config as vLLM holds it.
        target: the target's.
    """
    text = target.hf_text_config
    spec.check_target(
        drafter_hidden=hf.hidden_size,
        drafter_vocab=hf.vocab_size,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
    )
    if hf.max_position_embeddings < target.max_model_len:
        rope = getattr(hf, "rope_parameters", None) or {}
        kinds = {part.get("rope_type", "default") for part in (rope, *rope.values()) if isinstance(part, dict)}
        if not kinds.issubset(PLAIN_ROPE):
            raise DartreeConfigError(
                f"the drafter '{name}' has max_position_embeddings={hf.max_position_embeddings} and RoPE of the type "
                f"{', '.join(sorted(kinds))}, but max_model_len is {target.max_model_len}; set max_model_len to at "
                f"most {hf.max_position_embeddings}"
            )
        # The drafter drafts at the target's positions, so its table of angles must reach as far.
        hf.max_position_embeddings = target.max_model_len


def worker_class() -> str:
    """The qualified name of the worker for this platform.

    Raises:
        DartreeConfigError: the platform has none.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "vllm_dartree.engine.cpu_worker.DartreeCPUWorker"
    if current_platform.is_cuda():
        return "vllm_dartree.engine.worker.DartreeWorker"
    raise DartreeConfigError(
        "method 'dartree' runs on NVIDIA GPUs and, for tests, on CPUs, but vLLM runs on "
        f"'{current_platform.device_name}' here"
    )
