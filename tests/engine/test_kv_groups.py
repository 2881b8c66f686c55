"""Targets whose layers see different contexts, and requests that the scheduler leaves out for a step."""

import json
import shutil
from collections.abc import Callable

import pytest
from engine.engines import counted, dartree, engine, run, runner, tokens
from vllm import SamplingParams
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3Model
from vllm.model_executor.models.utils import extract_layer_index

from vllm_dartree.assets import TARGET
from vllm_dartree.engine import attention, speculator
from vllm_dartree.engine.state import TreeStep

WINDOW, BLOCK = 24, 128
SLIDING, FULL = "sliding_attention", "full_attention"
MIXED = (SLIDING, FULL, FULL, SLIDING, FULL)
DRAFTS = dartree(8, tree_width=4)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=1.0, seed=5, max_tokens=24),
    SamplingParams(temperature=0.7, top_p=0.9, seed=6, max_tokens=24),
]


@pytest.fixture(scope="module")
def text(prompts) -> list[int]:
    return [token for prompt in prompts for token in prompt]


@pytest.fixture(scope="module")
def long_prompts(text) -> list[list[int]]:
    """Longer than the window, and ending shortly before the ends of the first, second and third block."""
    return [text[i : i + n] for i, n in ((0, BLOCK - 12), (50, 2 * BLOCK - 8), (100, 3 * BLOCK - 5))]


class WindowedLayer(Qwen3DecoderLayer):
    """vLLM's Qwen3 gives all layers one window or none; this layer goes by ``layer_types``, as vLLM's Llama does."""

    def __init__(self, config, *args: object, prefix: str = "", **kwargs: object) -> None:
        slides = config.layer_types[extract_layer_index(prefix)] == SLIDING
        window = config.sliding_window if slides else None
        super().__init__(config, *args, prefix=prefix, per_layer_sliding_window=window, **kwargs)


@pytest.fixture(scope="session")
def target_with(tmp_path_factory) -> Callable[[tuple[str, ...]], str]:
    """The bundled target with layers of other types."""
    made: dict[tuple[str, ...], str] = {}

    def make(layer_types: tuple[str, ...]) -> str:
        if layer_types not in made:
            folder = shutil.copytree(TARGET, tmp_path_factory.mktemp("target") / "copy")
            file = folder / "config.json"
            config = json.loads(file.read_text()) | {"layer_types": layer_types, "sliding_window": WINDOW}
            # vLLM asks that "max_window_layers" be all layers wherever their types differ.
            config |= {"use_sliding_window": True, "max_window_layers": config["num_hidden_layers"]}
            file.write_text(json.dumps(config))
            made[layer_types] = str(folder)
        return made[layer_types]

    return make


@pytest.fixture
def mixed(target_with, monkeypatch):
    monkeypatch.setattr(Qwen3Model, "decoder_layer_type", WindowedLayer)
    return engine(model=target_with(MIXED)), engine(DRAFTS, model=target_with(MIXED))


def _crosses_a_block(step: TreeStep) -> bool:
    """Whether an accepted path has its rows in two cache blocks."""
    last = step.roots + step.accepted.num_accepted
    return bool((step.roots // BLOCK != last // BLOCK).any())


@pytest.mark.slow
def test_windows_beside_full_attention_in_groups_of_their_own(mixed, long_prompts, steps):
    plain, trees = mixed
    windows = [group.kv_cache_spec for group in runner(trees).kv_cache_config.kv_cache_groups]
    windows = [getattr(spec, "sliding_window", None) for spec in windows]
    assert windows.count(WINDOW) == 1
    assert windows.count(None) >= 1
    expected = tokens(run(plain, long_prompts, PARAMS))
    for one, other in zip(expected, tokens(run(engine(), long_prompts, PARAMS)), strict=True):
        assert one != other, "the window changes nothing"
    with counted(trees) as drafts:
        assert tokens(run(trees, long_prompts, PARAMS)) == expected
    assert drafts.tau > 2
    assert any(map(_crosses_a_block, steps))
    assert tokens(run(trees, long_prompts, PARAMS, arrive_every=3)) == expected


@pytest.mark.slow
def test_a_target_whose_layers_all_slide(target_with, long_prompts, steps):
    target = target_with((SLIDING,) * len(MIXED))
    plain, trees = engine(model=target), engine(DRAFTS, model=target)
    assert {layer.attention.sliding_window for layer in runner(trees).speculator.cached_layers} == {WINDOW}
    expected = tokens(run(plain, long_prompts, PARAMS))
    for one, other in zip(expected, tokens(run(engine(), long_prompts, PARAMS)), strict=True):
        assert one != other, "the window changes nothing"
    with counted(trees) as drafts:
        assert tokens(run(trees, long_prompts, PARAMS)) == expected
    assert drafts.tau > 2
    assert any(map(_crosses_a_block, steps))


@pytest.mark.slow
def test_trees_without_the_window_change_tokens(mixed, long_prompts, monkeypatch):
    plain, trees = mixed
    expected = tokens(run(plain, long_prompts, PARAMS))
    monkeypatch.setattr(attention, "_window_of", lambda impl: None)
    assert tokens(run(trees, long_prompts, PARAMS)) != expected


@pytest.mark.slow
def test_a_commit_by_the_slots_of_another_group_changes_tokens(mixed, long_prompts, monkeypatch):
    plain, trees = mixed
    expected = tokens(run(plain, long_prompts, PARAMS))
    native = speculator.commit_rows

    def commit_by_one_group(step, layers, slot_mappings, *args):
        return native(step, layers, dict.fromkeys(slot_mappings, slot_mappings[layers[0].name]), *args)

    monkeypatch.setattr(speculator, "commit_rows", commit_by_one_group)
    assert tokens(run(trees, long_prompts, PARAMS)) != expected


@pytest.mark.parametrize(("step_tokens", "rows_of_the_last"), [(16, 0), (19, 1)], ids=["left out", "without drafts"])
def test_a_request_for_whose_drafts_a_step_has_no_room(text, monkeypatch, step_tokens, rows_of_the_last):
    """Once the first request's prompt is done, its tree and the second's take all tokens of a step, or all but one."""
    three = [text[: step_tokens + 1], text[100:108], text[200:206]]
    expected = tokens(run(engine(), three, PARAMS))
    trees = engine(DRAFTS, max_num_scheduled_tokens=step_tokens)
    native, scheduled = runner(trees).execute_model, []

    def watched(scheduler_output, *args, **kwargs):
        by_request = scheduler_output.num_scheduled_tokens
        if by_request:
            scheduled.append({int(request.split("-")[0]): count for request, count in by_request.items()})
        return native(scheduler_output, *args, **kwargs)

    monkeypatch.setattr(runner(trees), "execute_model", watched)
    assert tokens(run(trees, three, PARAMS)) == expected
    # Its drafts were made with its prompt, in the step before it had to wait.
    assert scheduled[1] == {0: 1, 1: 8, 2: 6}
    last = [step.get(2, 0) for step in scheduled[2:]]
    waited = next(i for i, rows in enumerate(last) if rows > 1)
    assert waited >= 2
    assert set(last[:waited]) == {rows_of_the_last}
