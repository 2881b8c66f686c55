"""Drafters whose checkpoint is broken are refused by the name of the tensor; broken drafts cost speed alone."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine.engines import counted, dartree, engine, run, runner, tokens
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from vllm_dartree.engine.checkpoint import DrafterTensorError

GREEDY = SamplingParams(temperature=0, max_tokens=16)
BACKBONE, HEAD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


Tensors = dict[str, torch.Tensor]


def _edited(folder: str, shard: str, edit: Callable[[Tensors], object]) -> str:
    """Changes the tensors of a shard, and the index with them."""
    file = Path(folder) / shard
    content = load_file(file)
    edit(content)
    save_file(content, file, metadata={"format": "pt"})
    index = Path(folder) / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    places["weight_map"] = {k: v for k, v in places["weight_map"].items() if v != shard or k in content}
    places["weight_map"] |= dict.fromkeys(content, shard)
    index.write_text(json.dumps(places))
    return folder


def _fill(name: str, value: float) -> Callable[[Tensors], object]:
    return lambda content: content[name].view(-1)[7:8].fill_(value)


def _drop(name: str) -> Callable[[Tensors], object]:
    return lambda content: content.pop(name)


def _add(name: str) -> Callable[[Tensors], object]:
    return lambda content: content.update({name: torch.ones(3)})


def _cut(name: str) -> Callable[[Tensors], object]:
    return lambda content: content.update({name: content[name][:-1].contiguous()})


NAN, INFINITY = float("nan"), float("inf")
FAULTS = {
    "NaN": (BACKBONE, _fill("layers.1.mlp.up_proj.weight", NAN), "has NaN or infinity in its tensor 'layers.1.mlp.up"),
    "infinity in the head": (HEAD, _fill("embed_proj.2.weight", INFINITY), "infinity in its tensor 'embed_proj.2"),
    "missing": (BACKBONE, _drop("layers.1.self_attn.k_proj.weight"), "it has no tensor 'layers.1.self_attn.k_proj.we"),
    "missing in the head": (HEAD, _drop("prefix_gru.weight_hh_l0"), "it has no tensor 'prefix_gru.weight_hh_l0'"),
    "surplus": (BACKBONE, _add("layers.2.mlp.up_proj.weight"), "a tensor 'layers.2.mlp.up_proj.weight' that its"),
    "surplus in the head": (HEAD, _add("embed_proj.2.bias"), "a tensor 'embed_proj.2.bias' that its config.json has"),
    "shape": (BACKBONE, _cut("fc.weight"), "'fc.weight' of shape [191, 576] where its config.json needs [192, 576]"),
    "shape in the head": (
        HEAD,
        _cut("embed_proj.2.weight"),
        "'embed_proj.2.weight' of shape [1023, 64] where its config.json needs [1024, 64]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_checkpoint_is_refused_by_the_tensors_name(drafter_with, fault):
    shard, edit, words = FAULTS[fault]
    with pytest.raises(DrafterTensorError) as error:
        engine(dartree(model=_edited(drafter_with(), shard, edit)))
    assert words in str(error.value)


def test_a_checkpoint_that_is_cut_off_is_refused(drafter_with):
    folder = Path(drafter_with())
    content = (folder / HEAD).read_bytes()
    (folder / HEAD).write_bytes(content[:-100])
    with pytest.raises(DrafterTensorError, match="is broken, perhaps cut off"):
        engine(dartree(model=str(folder)))


@pytest.mark.parametrize("poison", [NAN, INFINITY])
def test_broken_logits_of_the_drafter_cost_acceptance_alone(prompts, monkeypatch, poison):
    trees = engine(dartree())
    drafter, rounds = runner(trees).speculator.model, itertools.count()
    native = drafter.compute_logits
    with counted(trees) as sound:
        expected = tokens(run(trees, prompts[:3], GREEDY))
    assert expected == tokens(run(engine(), prompts[:3], GREEDY))

    def broken(hidden):
        logits = native(hidden)
        if next(rounds) % 2:
            logits[::15] = poison  # the first slot of every request
        else:
            logits[4::15, 7:9] = poison  # two tokens of a later one
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "compute_logits", broken)
        with counted(trees) as drafts:
            assert tokens(run(trees, prompts[:3], GREEDY)) == expected
    assert drafts.tau < sound.tau
    with counted(trees) as drafts:
        assert tokens(run(trees, prompts[:3], GREEDY)) == expected
    assert drafts == sound
