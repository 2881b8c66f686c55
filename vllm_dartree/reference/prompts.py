"""Prompts to compare on: a JSONL file, or one of METHOD's data sets by name."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase


class PromptError(ValueError):
    """Prompts cannot be found or read; the message says which and why."""


_REASON = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CODE = "Write a solution to the following problem and make sure that it passes the tests:\n{}"


@dataclass(frozen=True)
class DataSet:
    """Where a data set lies on the hub, how many samples are usual, and how a row becomes a user message."""

    path: str
    name: str | None
    split: str
    samples: int
    message: Callable[[dict[str, Any]], str]


DATA_SETS: dict[str, DataSet] = {
    "gsm8k": DataSet("openai/gsm8k", "main", "test", 128, lambda row: _REASON.format(row["question"])),
    "math500": DataSet("HuggingFaceH4/MATH-500", None, "test", 128, lambda row: _REASON.format(row["problem"])),
    "aime25": DataSet("math-ai/aime25", None, "test", 30, lambda row: _REASON.format(row["problem"])),
    "humaneval": DataSet("openai/openai_humaneval", None, "test", 164, lambda row: _CODE.format(row["prompt"])),
    "mbpp": DataSet("google-research-datasets/mbpp", "full", "test", 128, lambda row: _CODE.format(row["text"])),
    "mt-bench": DataSet("HuggingFaceH4/mt_bench_prompts", None, "train", 80, lambda row: row["prompt"][0]),
    "alpaca": DataSet(
        "tatsu-lab/alpaca",
        None,
        "train",
        128,
        lambda row: f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"],
    ),
}


def load_prompts(source: str, tokenizer: PreTrainedTokenizerBase, max_samples: int | None = None) -> list[list[int]]:
    """Token ids of the prompts.

    Args:
        source: a JSONL file whose lines have ``prompt_token_ids`` or ``prompt``, or a name in ``DATA_SETS``, whose
            rows pass the tokenizer's chat template.
        tokenizer: the target's.
        max_samples: at most so many; None takes all of a file, and the usual number of a data set.

    Raises:
        PromptError: the file or the data set cannot be read, or has no prompts.
    """
    if source in DATA_SETS:
        return _from_data_set(source, tokenizer, max_samples)
    path = Path(source)
    if not path.is_file():
        raise PromptError(f"'{source}' is neither a file nor one of the data sets {', '.join(DATA_SETS)}")
    prompts: list[list[int]] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a JSON string may hold what str.splitlines splits at
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"'{source}' cannot be read as UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_prompt_of(line, f"{source}, line {number}", tokenizer))
    if not prompts:
        raise PromptError(f"'{source}' has no prompts")
    return prompts[:max_samples]


def _prompt_of(line: str, place: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    if not isinstance(row, dict) or not {"prompt_token_ids", "prompt"}.intersection(row):
        raise PromptError(f"{place}: a line must be a JSON object with 'prompt_token_ids' or 'prompt'")
    if "prompt_token_ids" in row:
        ids = row["prompt_token_ids"]
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < len(tokenizer) for i in ids):
            raise PromptError(f"{place}: 'prompt_token_ids' must be a list of ids from 0 to {len(tokenizer) - 1}")
        return ids
    if not isinstance(row["prompt"], str) or not row["prompt"]:
        raise PromptError(f"{place}: 'prompt' must be a text that is not empty")
    return tokenizer.encode(row["prompt"])


def _from_data_set(name: str, tokenizer: PreTrainedTokenizerBase, max_samples: int | None) -> list[list[int]]:
    data_set = DATA_SETS[name]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise PromptError(f"data set '{name}' needs the package datasets: pip install 'vllm-dartree[bench]'") from error
    if tokenizer.chat_template is None:
        raise PromptError(f"data set '{name}' needs a target whose tokenizer has a chat template")
    try:
        rows = load_dataset(data_set.path, data_set.name, split=data_set.split)
    except Exception as error:  # datasets raises whatever its transport does
        raise PromptError(
            f"data set '{name}' ({data_set.path}) could not be loaded: {type(error).__name__}; the hub must be "
            "reachable or the data set in the local cache"
        ) from error
    count = min(max_samples or data_set.samples, len(rows))
    messages = [[{"role": "user", "content": data_set.message(rows[i])}] for i in range(count)]
    return [
        tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
        for message in messages
    ]
