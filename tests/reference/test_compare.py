"""The comparison as a user runs it: table, JSON, plots, and one clear error for every mistake."""

import json

import pytest

from vllm_dartree.assets import DSPARK, PROMPTS
from vllm_dartree.cli import main
from vllm_dartree.reference.systems import SYSTEMS

ROW_KEYS = {
    "method", "temperature", "tau", "tokens", "rounds", "accept_by_depth", "hit_rate_on_spine",
    "hit_rate_after_sibling", "seconds", "tokens_per_second", "speedup_vs_ar", "draft_ms", "tree_ms", "verify_ms",
    "commit_ms", "identical_to_ar",
}  # fmt: skip


def test_all_methods_on_the_bundled_pair(tmp_path, capsys):
    out, plots = tmp_path / "results.json", tmp_path / "plots"
    command = ["compare", "--max-samples", "3", "--max-new-tokens", "64", "--out", str(out), "--plot", str(plots)]
    assert main([*command, "--sweep-budget", "8,32", "--sweep-width", "2"]) == 0
    results = json.loads(out.read_text())
    assert [row["method"] for row in results["rows"]] == list(SYSTEMS)
    for row in results["rows"]:
        assert set(row) == ROW_KEYS
        assert row["identical_to_ar"]
        assert row["accept_by_depth"] == sorted(row["accept_by_depth"], reverse=True)
        # What the target emits besides accepted nodes is one token a round; the last round may be cut.
        assert row["tau"] <= 1 + sum(row["accept_by_depth"]) + 1e-9
    assert results["config"]["num_prompts"] == 3
    assert [(sweep["knob"], sweep["budget"], sweep["width"]) for sweep in results["sweeps"]] == [
        ("budget", 8, 12),
        ("budget", 32, 12),
        ("width", 64, 2),
    ]
    assert {path.name for path in plots.iterdir()} == {
        "tau.png",
        "speedup_vs_ar.png",
        "tau_by_budget.png",
        "tau_by_width.png",
    }
    printed = capsys.readouterr().out
    assert all(name in printed for name in SYSTEMS)


def test_methods_and_temperature_are_chosen(tmp_path):
    out = tmp_path / "results.json"
    command = [
        "compare",
        "--methods",
        "dartree",
        "--temperature",
        "0.7",
        "--max-samples",
        "2",
        "--max-new-tokens",
        "32",
    ]
    assert main([*command, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["method"], row["temperature"], row["identical_to_ar"]) for row in rows] == [
        ("ar", 0.7, True),
        ("dartree", 0.7, True),
    ]


def test_what_the_drafter_has_no_head_for_is_left_out_with_a_line(capsys):
    assert main(["compare", "--draft", str(DSPARK), "--max-samples", "1", "--max-new-tokens", "8"]) == 0
    assert "left out, since no drafter here has their head: domino, domino_chain_ddtree" in capsys.readouterr().out


def test_a_file_of_prompts_without_ids_is_tokenised(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompt = json.loads(PROMPTS.read_text().splitlines()[0])["prompt"] + "\u2028"
    prompts.write_text(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert main(["compare", "--methods", "ar", "--prompts", str(prompts), "--max-new-tokens", "4"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "dartree,magic"], "--methods is 'dartree,magic', but it must be 'all' or some of ar, dflash"),
        (["--methods", ""], "--methods is ''"),
        # Before the target is read.
        (["--methods", "magic", "--target", "no/such-model"], "--methods is 'magic'"),
        (["--depth-bonus", "0.5"], "--depth-bonus is 0.5"),
        (["--budget", "0"], "--budget is 0"),
        (["--dflash2-draft", str(DSPARK), "--methods", "dflash2"], "'dflash2' needs a drafter with a selector head"),
        (
            ["--width", "65"],
            "the anchor has only as many children as there are candidates; lower --width or raise --candidates",
        ),
        (["--sweep-budget", "8,many"], "--sweep-budget is '8,many'"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--max-samples", "0"], "--max-samples is 0"),
        (["--target", "no/such-model"], "--target is 'no/such-model', which is neither a folder here nor a checkpoint"),
        (["--draft", "no/such-model"], "--draft is 'no/such-model', which is neither a folder here nor a checkpoint"),
        (["--draft", str(DSPARK), "--methods", "domino"], "'domino' needs a drafter with a domino head"),
        (["--prompts", "nothing.jsonl"], "'nothing.jsonl' is neither a file nor one of the data sets gsm8k"),
        (["--prompts", "gsm8k"], "needs a target whose tokenizer has a chat template"),
        (["--device", "tpu9"], "--device is 'tpu9'"),
        (["--device", "meta"], "--device is 'meta'"),
        (["--target", "/etc"], "--target is '/etc', but that folder has no config.json"),
        (["--draft", ""], "--draft is ''"),
        (["--candidates", "5000"], "--candidates is 5000, but the target's vocabulary has 1024 tokens"),
        (["--budget", "2000", "--methods", "dartree_fixed"], "lower --budget or raise --candidates"),
        (["--out", "/nonexistent/results.json"], "--out is '/nonexistent/results.json', but it must be a file"),
        (["--plot", "/dev/null/plots"], "--plot is '/dev/null/plots', which is no folder that can be made"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, words, capsys):
    assert main(["compare", "--max-new-tokens", "4", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vllm-dartree compare: error: ")
    assert words in error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1: a line must be a JSON object"),
        ('{"text": "a"}', "line 1: a line must be a JSON object with 'prompt_token_ids' or 'prompt'"),
        ("[1, 2]", "line 1: a line must be a JSON object"),
        ('{"prompt_token_ids": 5}', "line 1: 'prompt_token_ids' must be a list of ids"),
        ('{"prompt_token_ids": [true]}', "line 1: 'prompt_token_ids' must be a list of ids"),
        ('{"prompt": 5}', "line 1: 'prompt' must be a text"),
        ('{"prompt": ""}', "line 1: 'prompt' must be a text that is not empty"),
        ('{"prompt_token_ids": [1, 99999]}', "ids from 0 to 1023"),
        ('{"prompt_token_ids": []}', "ids from 0 to 1023"),
        ("", "has no prompts"),
    ],
)
def test_mistakes_in_a_file_of_prompts_name_the_line(tmp_path, line, words, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(line + "\n")
    assert main(["compare", "--prompts", str(prompts)]) == 2
    assert words in capsys.readouterr().err
