"""Trains the bundled tiny pair on a CPU: a Qwen3-shaped target and a DFlash-shaped drafter with three heads.

    python scripts/train_tiny_pair.py                     # the bundled pair, about 50 minutes on two cores
    python scripts/train_tiny_pair.py --steps 5 --files 200 --out miniature --work-dir work

Everything is a function of ``--seed`` (and of the standard library of the Python in use, which is part of the
corpus). Progress is saved in ``--work-dir`` every ``--save-every`` steps, and a later run with the same arguments
goes on from there. Drafting needs no generation: windows of the corpus with random anchors stand for contexts, the
target's argmax is the label, and a slot counts only while all earlier tokens of its block equal the argmax.
"""

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tiny_corpus import prompt_of, standard_library_files, synthetic_files, title_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from vllm_dartree.heads.spec import DrafterSpec
from vllm_dartree.reference.drafter import BlockDrafter

VOCAB, SEQUENCE, BATCH, ANCHORS, MAX_POSITIONS = 1024, 384, 16, 24, 2048
END, MASK = "<|endoftext|>", "<|mask|>"
BLOCK, MARKOV_RANK, LOSS_DECAY = 16, 32, 7.0
DOMINO = {"projector_type": "domino", "gru_hidden_dim": 128, "emb_dim": 64, "pure_draft_prefix_len": 1}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 64, "selector_rank": 32, "selector_top_k": 16}
ASSETS = Path(__file__).resolve().parents[1] / "vllm_dartree" / "assets"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS, help="where the checkpoints and the prompts go")
    parser.add_argument("--work-dir", type=Path, default=Path("runs/tiny_pair"), help="where unfinished work is kept")
    parser.add_argument(
        "--steps", type=int, help="optimiser steps of target, drafter and selector each (default: 1100, 1200, 200)"
    )
    parser.add_argument("--files", type=int, default=18_000, help="synthetic files in the corpus")
    parser.add_argument("--prompts", type=int, default=96, help="held-out prompts to write")
    parser.add_argument("--save-every", type=int, default=100, help="steps between two saves of unfinished work")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END, MASK], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, mask_token=MASK)


class Corpus:
    """All files in one stream, each closed by the end token; windows start at files and every SEQUENCE tokens."""

    def __init__(self, texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
        encodings = tokenizer.backend_tokenizer.encode_batch(texts)
        files = [[*encoding.ids, tokenizer.eos_token_id] for encoding in encodings]
        starts, length = [], 0
        for ids in files:
            starts += range(length, length + len(ids), SEQUENCE)
            length += len(ids)
        self.tokens = torch.tensor([token for ids in files for token in ids])
        self.starts = torch.tensor([start for start in starts if start + SEQUENCE <= length])

    def batch(self, generator: torch.Generator, size: int = BATCH) -> Tensor:  # [size, SEQUENCE]
        starts = self.starts[torch.randint(len(self.starts), (size,), generator=generator)]
        return self.tokens[starts[:, None] + torch.arange(SEQUENCE)]


class Training:
    """Muon for the matrices of the layers, AdamW for all else; warm-up, constant, then linear to 2%."""

    def __init__(
        self, name: str, module: nn.Module, matrices: list[nn.Parameter], args: argparse.Namespace, steps: int
    ):
        self.name, self.module, self.args, self.steps, self.step = name, module, args, steps, 0
        chosen = set(matrices)
        rest = [parameter for parameter in module.parameters() if parameter not in chosen]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
            torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, self._scale) for optimizer in self.optimizers]
        self.path = args.work_dir / f"{name}.pt"

    def _scale(self, step: int) -> float:
        warm_up, decay = min(50, self.steps // 2), max(1, round(0.35 * self.steps))
        return min((step + 1) / max(1, warm_up), 1.0, max(0.02, (self.steps - step) / decay))

    def _parts(self) -> dict[str, object]:
        return {"module": self.module, **{f"optimizer{i}": o for i, o in enumerate(self.optimizers)}} | {
            f"schedule{i}": s for i, s in enumerate(self.schedules)
        }

    def _resume(self) -> None:
        if not self.path.exists():
            return
        saved = torch.load(self.path, weights_only=True)
        for key, part in self._parts().items():
            part.load_state_dict(saved[key])
        self.step = saved["step"]

    def _save(self) -> None:
        unfinished = self.path.with_suffix(".tmp")
        torch.save({key: part.state_dict() for key, part in self._parts().items()} | {"step": self.step}, unfinished)
        unfinished.replace(self.path)

    def run(self, losses: Callable[[torch.Generator], dict[str, Tensor]]) -> None:
        """Minimises the sum of ``losses``; a step's batch depends on the seed and the step alone, so a resumed run
        sees what an uninterrupted one would have seen."""
        self._resume()
        progress = tqdm(total=self.steps, initial=self.step, desc=self.name, unit="step")
        while self.step < self.steps:
            generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + self.step)
            terms = losses(generator)
            sum(terms.values()).backward()
            nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            self.step += 1
            progress.update()
            if self.step % 10 == 0:
                progress.set_postfix({key: f"{value.item():.3f}" for key, value in terms.items()})
            if self.step % self.args.save_every == 0 or self.step == self.steps:
                self._save()
        progress.close()


def qwen3_config(**changes: object) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=192,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=MAX_POSITIONS,
        eos_token_id=0,
        dtype="bfloat16",
        **changes,
    )


def train_target(corpus: Corpus, args: argparse.Namespace) -> Qwen3ForCausalLM:
    torch.manual_seed(args.seed)
    model = Qwen3ForCausalLM(qwen3_config(intermediate_size=640, num_hidden_layers=5, tie_word_embeddings=True))

    def losses(generator: torch.Generator) -> dict[str, Tensor]:
        tokens = corpus.batch(generator)
        logits = model(tokens, use_cache=False).logits[:, :-1]
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())}

    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    Training("target", model.float(), matrices, args, args.steps or 1100).run(losses)
    # What is shipped is bf16; the drafter learns from exactly those weights.
    return model.bfloat16().float().eval().requires_grad_(False)


def drafter_config(head: dict[str, object], mask_token_id: int) -> dict[str, object]:
    """The ``config.json`` of one of the two drafters; ``head`` holds the keys that set them apart."""
    config = qwen3_config(intermediate_size=512, num_hidden_layers=2, tie_word_embeddings=False).to_dict()
    dflash = {"mask_token_id": mask_token_id, "target_layer_ids": [1, 2, 3]}
    dflash |= head.pop("dflash_config", {})
    config |= {"block_size": BLOCK, "num_target_layers": 5, "dflash_config": dflash} | head
    return {key: value for key, value in config.items() if key not in ("_name_or_path", "id2label", "label2id")}


class TwoHeadDrafter(nn.Module):
    """One backbone under a Domino head and a Markov head, trained together."""

    def __init__(self, domino: dict[str, object], dspark: dict[str, object], target: Qwen3ForCausalLM) -> None:
        super().__init__()
        config = Qwen3Config(**domino)
        self.drafter = BlockDrafter(config, DrafterSpec.from_config(domino))
        self.markov_head = BlockDrafter(config, DrafterSpec.from_config(dspark)).markov_head
        self.drafter.norm.load_state_dict(target.model.norm.state_dict())
        nn.init.zeros_(self.drafter.embed_proj[2].weight)
        nn.init.zeros_(self.markov_head.markov_w2.weight)


@dataclass
class BlockBatch:
    """Blocks behind random anchors in a batch of windows, ``M`` of them."""

    hidden: Tensor  # [M, L, H], the drafter's, of the slots
    base: Tensor  # [M, L, V]
    prefix: Tensor  # [M, L] int64, the anchor and the drafted tokens before each slot
    labels: Tensor  # [M, L] int64, the target's choices
    weights: Tensor  # [M, L], 0 where an earlier token of the block is not the target's

    def loss(self, logits: Tensor) -> Tensor:
        entropy = F.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), reduction="none")
        return (entropy.view_as(self.weights) * self.weights).sum() / self.weights.sum()


def draft_blocks(
    target: Qwen3ForCausalLM, drafter: BlockDrafter, tokens: Tensor, generator: torch.Generator
) -> BlockBatch:
    """Drafts ``ANCHORS`` blocks in each window of ``tokens`` (``[N, SEQUENCE]``)."""
    spec, embed = drafter.spec, target.model.embed_tokens
    decay = torch.exp(-torch.arange(spec.num_slots) / LOSS_DECAY)
    windows = tokens.shape[0]
    positions = torch.arange(SEQUENCE).expand(windows, -1)
    block_of_row = torch.arange(ANCHORS).repeat_interleave(BLOCK)
    with torch.no_grad():
        outputs = target(tokens, use_cache=False, output_hidden_states=True)
        features = torch.cat([outputs.hidden_states[layer + 1] for layer in spec.target_layer_ids], dim=-1)
        choices = outputs.logits.argmax(-1)  # [N, SEQUENCE], the target's token after each position
    anchors = torch.randint(1, SEQUENCE - BLOCK, (windows, ANCHORS), generator=generator)
    rows = anchors[..., None] + torch.arange(BLOCK)  # [N, ANCHORS, BLOCK]
    window = torch.gather(tokens, 1, rows.flatten(1)).view_as(rows)
    labels = torch.gather(choices, 1, rows[..., :-1].flatten(1)).view(windows, ANCHORS, spec.num_slots)
    agrees = window[..., 1:] == labels
    counted = torch.cat([torch.ones_like(agrees[..., :1]), agrees.cumprod(-1)[..., :-1].bool()], dim=-1)

    block = torch.full_like(rows, spec.mask_token_id)
    block[..., 0] = window[..., 0]
    sees_context = positions[:, None] < anchors[:, block_of_row, None]  # [N, ANCHORS * BLOCK, SEQUENCE]
    same_block = (block_of_row[:, None] == block_of_row).expand(windows, -1, -1)
    mask = torch.cat([sees_context, same_block], dim=-1)[:, None]
    hidden = drafter(embed(block.flatten(1)), rows.flatten(1), drafter.context_kv(features, positions), mask)
    hidden = hidden.view(windows * ANCHORS, BLOCK, -1)[:, 1:]
    prefix, weights = window[..., :-1].flatten(0, 1), (counted * decay).flatten(0, 1)
    return BlockBatch(hidden, target.lm_head(hidden), prefix, labels.flatten(0, 1), weights)


def train_drafter(
    target: Qwen3ForCausalLM,
    configs: tuple[dict[str, object], dict[str, object]],
    corpus: Corpus,
    args: argparse.Namespace,
) -> TwoHeadDrafter:
    torch.manual_seed(args.seed + 1)
    module = TwoHeadDrafter(*configs, target)
    drafter, spec = module.drafter, module.drafter.spec
    corrected = torch.arange(1, spec.num_slots + 1) > spec.pure_draft_prefix_len

    def losses(generator: torch.Generator) -> dict[str, Tensor]:
        batch = draft_blocks(target, drafter, corpus.batch(generator), generator)
        state, _ = drafter.prefix_gru(target.model.embed_tokens(batch.prefix))
        correction = drafter.embed_proj(torch.cat([batch.hidden, state], dim=-1)) * corrected[:, None]
        markov = module.markov_head.markov_w2(module.markov_head.markov_w1(batch.prefix))
        return {
            "base": batch.loss(batch.base),
            "domino": batch.loss(batch.base + correction),
            "markov": batch.loss(batch.base.detach() + markov),
        }

    matrices = [p for p in [*drafter.layers.parameters(), *drafter.fc.parameters()] if p.ndim == 2]
    Training("drafter", module, matrices, args, args.steps or 1200).run(losses)
    # What is shipped is bf16; the selector learns on exactly those weights.
    return module.bfloat16().float().requires_grad_(False)


class Selector(nn.Module):
    """DFlash2's table of transitions: predecessors, modulated by the slot's hidden state, against successors."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(VOCAB, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(VOCAB, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, prefix: Tensor, hidden: Tensor) -> Tensor:
        return (self.predecessor_codebook[prefix] * self.hidden_projection(hidden)) @ self.successor_codebook.mT


def train_selector(
    target: Qwen3ForCausalLM, drafter: BlockDrafter, corpus: Corpus, args: argparse.Namespace
) -> Selector:
    torch.manual_seed(args.seed + 2)
    selector = Selector(drafter.config.hidden_size, DFLASH2["selector_rank"])

    def losses(generator: torch.Generator) -> dict[str, Tensor]:
        with torch.no_grad():
            batch = draft_blocks(target, drafter, corpus.batch(generator, BATCH // 4), generator)
        return {"selector": batch.loss(batch.base + selector(batch.prefix, batch.hidden))}

    Training("selector", selector, [selector.hidden_projection.weight], args, args.steps or 200).run(losses)
    return selector


def passing_convolutions(num_layers: int, hidden_size: int) -> dict[str, Tensor]:
    """DFlash2's convolutions over the rows of a block, set to pass each row through: the backbone has none."""
    taps, groups = DFLASH2["conv_kernel_size"], hidden_size // DFLASH2["conv_group_size"]
    base = torch.zeros(2, taps, hidden_size)  # before and after attention or MLP
    base[:, 0] = 1
    tensors = {}
    for layer in range(num_layers):
        for place in ("attention_conv", "mlp_conv"):
            tensors[f"layers.{layer}.{place}.base_kernel"] = base.clone()
            tensors[f"layers.{layer}.{place}.kernel_projection.weight"] = torch.zeros(2 * taps * groups, hidden_size)
    return tensors


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_drafter(folder: Path, config: dict[str, object], shards: list[tuple[Path | None, dict[str, Tensor]]]) -> None:
    """Writes a checkpoint of several shards; a shard with a path is a link to that file of another checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    weight_map: dict[str, str] = {}
    for number, (shared, tensors) in enumerate(shards, start=1):
        shard = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.unlink(missing_ok=True)
        if shared is None:
            save_file(tensors, shard, metadata={"format": "pt"})
        else:
            shard.symlink_to(os.path.relpath(shared, folder))
        weight_map |= dict.fromkeys(tensors, shard.name)
    size = sum(tensor.numel() * tensor.element_size() for _, tensors in shards for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def main() -> None:
    args = parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    texts = synthetic_files(args.seed, args.files) + list(standard_library_files())
    tokenizer = train_tokenizer(texts)
    corpus = Corpus(texts, tokenizer)
    print(f"corpus: {len(texts)} files, {len(corpus.tokens):,} tokens")

    target = train_target(corpus, args)
    folder = args.out / "tiny-target"
    target.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    target.float()

    mask_token_id = tokenizer.convert_tokens_to_ids(MASK)
    domino = drafter_config(
        {"architectures": ["DFlashDraftModel"], "dflash_config": DOMINO | {"shift_label": False}}, mask_token_id
    )
    dspark = drafter_config(
        {"architectures": ["Qwen3DSparkModel"], "markov_rank": MARKOV_RANK, "sample_from_anchor": False}, mask_token_id
    )
    dflash2 = drafter_config({"architectures": ["DFlash2DraftModel"], "dflash_config": DFLASH2}, mask_token_id)
    module = train_drafter(target, (domino, dspark), corpus, args)
    selector = train_selector(target, module.drafter, corpus, args)
    module.bfloat16()
    tensors = {name: tensor.contiguous() for name, tensor in module.drafter.state_dict().items()}
    head = {name: tensor for name, tensor in tensors.items() if name.startswith(("prefix_gru.", "embed_proj."))}
    backbone = {name: tensor for name, tensor in tensors.items() if name not in head}
    markov = {f"markov_head.{name}": tensor.contiguous() for name, tensor in module.markov_head.state_dict().items()}
    edges = {f"candidate_selector.{name}": tensor for name, tensor in selector.state_dict().items()}
    edges |= passing_convolutions(len(module.drafter.layers), module.drafter.config.hidden_size)
    edges = {name: tensor.bfloat16() for name, tensor in edges.items()}
    write_drafter(args.out / "tiny-domino", domino, [(None, backbone), (None, head)])
    shared = args.out / "tiny-domino" / "model-00001-of-00002.safetensors"
    write_drafter(args.out / "tiny-dspark", dspark, [(shared, backbone), (None, markov)])
    write_drafter(args.out / "tiny-dflash2", dflash2, [(shared, backbone), (None, edges)])

    # Held out, and short enough to end before the positions that the target has not been trained on.
    known = {prompt_of(text) for text in texts[: args.files]}
    fresh = [text for text in synthetic_files(args.seed + 1, 4 * args.prompts) if prompt_of(text) not in known]
    short = [text for text in fresh if len(tokenizer.encode(text)) < SEQUENCE]
    # Every second prompt leaves the specification to the model, which is harder to guess than what copies one.
    openings = [(prompt_of, title_of)[number % 2](text) for number, text in enumerate(short)]
    prompts = list(dict.fromkeys(openings))[: args.prompts]
    with open(args.out / "prompts.jsonl", "w") as file:
        for prompt in prompts:
            file.write(json.dumps({"prompt": prompt, "prompt_token_ids": tokenizer.encode(prompt)}) + "\n")
    written = [path for path in args.out.rglob("*") if path.is_file() and not path.is_symlink()]
    megabytes = sum(path.stat().st_size for path in written) / 1e6
    print(f"wrote {args.out}: {math.ceil(megabytes * 10) / 10} MB")


if __name__ == "__main__":
    main()
