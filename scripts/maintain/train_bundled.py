"""Train the bundled model: one command, resumable after a kill at any moment.

    cd scripts/maintain
    python train_bundled.py --books BOOKS/train --work WORK                    # tokenizer, then training, then export
    torchrun --nproc_per_node=2 train_bundled.py --books ... --work ...        # the same over several processes
    python train_bundled.py --work WORK --export-only                          # WORK/model from the latest checkpoint
    python train_bundled.py --books ... --work NEW --init-from WORK/model      # train an exported model further

A recipe is a shape and a list of stages (context length, share of the tokens); the learning rate follows one cosine
over all of them. Rope base and positions are those of the longest context from the first step: part of the short
documents is shown at stretched positions (PoSE, arXiv 2309.10400). Matrices are trained by Muon, the rest by AdamW.
WORK keeps tokenizer.model, the tokenized books, checkpoint.pt and log.jsonl; the exported folder is WORK/model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the other programs and their helpers lie

from common import parser_of, refusing
from gpt_fast_sd.model import ModelConfig, Transformer, load_model, save_hugging_face
from maintain.bundled_data import Books, book_paths, skipped_positions, training_document
from measuring.ledger import write_whole

WARM_UP_STEPS = 50
UNREADABLE = (OSError, RuntimeError, EOFError, LookupError, AttributeError, TypeError, pickle.UnpicklingError)
TOKENIZER_CONFIG = {  # transformers then encodes as sentencepiece does, BOS first (but drops a text's leading space)
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "add_bos_token": True,
    "add_eos_token": False,
    "legacy": False,
    "clean_up_tokenization_spaces": False,
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Training at one context length; sequences is how many share a step in each process."""

    context: int
    sequences: int
    share: float  # of all tokens
    stretched: float  # part of the sequences whose positions are spread over all that the model knows
    mixture: str = "prose"  # which of bundled_data.MIXTURES


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained, and on how much of what."""

    config: ModelConfig
    stages: tuple[Stage, ...]
    tokens: float
    compiled_context: int  # stages up to here run compiled: long ones gain little from it and would each compile again
    held_out_every: int  # steps

    def __post_init__(self) -> None:
        if not math.isclose(sum(stage.share for stage in self.stages), 1.0):
            raise ValueError(f"the stages' shares must sum to 1, got {[stage.share for stage in self.stages]}")

    def stage(self, done: float) -> Stage:
        """The stage after this part, 0 to 1, of all tokens."""
        edges = np.cumsum([stage.share for stage in self.stages])
        return self.stages[min(int(np.searchsorted(edges, done, side="right")), len(self.stages) - 1)]


RECIPES = {
    "bundled": Recipe(
        config=ModelConfig(
            vocab_size=4096, dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=64, ffn_dim=1024,
            max_seq_len=16384, rope_theta=500_000.0, tie_embeddings=True, bos_id=1, eos_ids=(2,),
        ),
        stages=(
            Stage(context=80, sequences=24, share=0.05, stretched=0.0, mixture="copying"),
            Stage(context=512, sequences=8, share=0.77, stretched=0.3),
            Stage(context=2048, sequences=2, share=0.12, stretched=0.5),
            Stage(context=8192, sequences=1, share=0.04, stretched=0.3),
            Stage(context=16384, sequences=1, share=0.02, stretched=0.0),
        ),
        tokens=30e6,
        compiled_context=512,
        held_out_every=250,
    ),
    "test": Recipe(
        config=ModelConfig(
            vocab_size=512, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=64,
            max_seq_len=256, rope_theta=10_000.0, tie_embeddings=True, bos_id=1, eos_ids=(2,),
        ),
        stages=(
            Stage(context=32, sequences=4, share=0.1, stretched=0.0, mixture="copying"),
            Stage(context=64, sequences=4, share=0.5, stretched=0.3),
            Stage(context=128, sequences=2, share=0.2, stretched=0.5),
            Stage(context=256, sequences=1, share=0.2, stretched=0.0),
        ),
        tokens=20e3,
        compiled_context=0,
        held_out_every=25,
    ),
}  # fmt: skip


# ---- tokenizer -----------------------------------------------------------------------------------------------------


class Pieces:
    """sentencepiece as the documents want it."""

    def __init__(self, path: Path) -> None:
        self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.bos_id, self.eos_id = self.model.bos_id(), self.model.eos_id()

    def encode(self, text: str) -> list[int]:
        """Token ids, no BOS."""
        ids: list[int] = self.model.encode(text)
        return ids


def train_tokenizer(books: list[Path], path: Path, vocab_size: int) -> None:
    """Write a byte-fallback BPE of vocab_size pieces learned from the books; ValueError where they hold too little."""
    partial = path.with_name("partial")
    try:
        sentencepiece.SentencePieceTrainer.train(
            input=[str(book) for book in books], model_prefix=str(partial), model_type="bpe", vocab_size=vocab_size,
            byte_fallback=True, split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            character_coverage=0.9995, max_sentence_length=20000, input_sentence_size=60000,
            shuffle_input_sentence=True, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=2,
        )  # fmt: skip
    except RuntimeError:
        raise ValueError(f"too few tokens: the books cannot fill a vocabulary of {vocab_size:,} pieces") from None
    partial.with_suffix(".vocab").unlink()
    partial.with_suffix(".model").rename(path)


# ---- model ---------------------------------------------------------------------------------------------------------


class TrainingAttention:
    """A KV that attends causally within the call, in bf16; its memory is linear in T, that of the backward pass too."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q [B, N, T, H]; k, v [B, K, T, H]; pos [B, T] -> [B, N, T, H]"""
        q, k, v = (x.bfloat16() for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def loss_of(model: nn.Module, tokens: Tensor, pos: Tensor) -> Tensor:
    """Mean next-token cross entropy in nats: tokens [B, T + 1], pos [B, T] -> scalar."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1], pos, TrainingAttention())
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def initialise(model: Transformer) -> None:
    """GPT-2 style normal weights, the two residual outputs of a layer scaled by depth."""
    for name, p in model.named_parameters():
        if p.dim() == 2:
            residual = name.endswith(("wo.weight", "w_out.weight"))
            nn.init.normal_(p, std=0.02 / (math.sqrt(2 * model.config.n_layers) if residual else 1.0))


def make_optimizers(model: Transformer, kind: str) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices and AdamW for the rest, or AdamW for everything."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "layers" in n]
    rest = [p for n, p in model.named_parameters() if not (p.dim() == 2 and "layers" in n)]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": 4e-3, "weight_decay": 0.0}]
    if kind == "adamw":
        groups.append({"params": matrices, "lr": 3e-3, "weight_decay": 0.1})
        return [torch.optim.AdamW(groups, betas=(0.9, 0.95))]
    return [
        torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.02, momentum=0.95, adjust_lr_fn="original"),
    ]


def learning_rate_scale(step: int, done: float) -> float:
    """Linear warm-up, then a cosine from 1 to a twentieth over all tokens; done is the part of them seen, 0 to 1."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


# ---- data ----------------------------------------------------------------------------------------------------------


def batch(
    step: int, rank: int, stage: Stage, books: Books, pieces: Pieces, seed: int, max_pos: int
) -> tuple[Tensor, Tensor]:
    """The documents of one step, a pure function of (seed, step, rank): tokens [B, T + 1], pos [B, T]."""
    rng = np.random.default_rng((seed, step, rank))
    n, rows = stage.context, range(stage.sequences)
    tokens = [training_document(rng, n + 1, books, pieces, stage.mixture) for _ in rows]
    pos = [skipped_positions(rng, n, max_pos) if rng.random() < stage.stretched else np.arange(n) for _ in rows]
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(pos))


@torch.no_grad()
def held_out_loss(model: nn.Module, books: Books, pieces: Pieces, context: int, device: torch.device) -> float:
    """Mean loss over a fixed set of passages, context tokens each, from the tails of the training books."""
    rng = np.random.default_rng(0)
    pos = torch.arange(context, device=device).expand(8, -1)  # [8, context]
    losses = []
    for _ in range(8):
        ids = np.stack([np.append(pieces.bos_id, books.passage(rng, context, held_out=True)) for _ in range(8)])
        losses.append(loss_of(model, torch.from_numpy(ids).to(device), pos).item())
    return sum(losses) / len(losses)


# ---- state ---------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """What a checkpoint holds: weights, optimizer states, and how far they are."""

    model: Transformer
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    tokens: int = 0

    def save(self, path: Path) -> None:
        """Write the checkpoint; a kill leaves the old one or the new one."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": states, "step": self.step, "tokens": self.tokens}
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self, path: Path, device: torch.device) -> None:
        """Go on where the checkpoint was saved; ValueError where it cannot be read or belongs to something else."""
        try:
            state = torch.load(path, weights_only=True, map_location=device)
            weights, saved = state["model"], state["optimizers"]
            self.step, self.tokens = state["step"], state["tokens"]
            shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
        except UNREADABLE as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{path} is no checkpoint that can be read: {reason}") from None
        for name, tensor in self.model.state_dict().items():
            if shapes.get(name) != list(tensor.shape):
                raise ValueError(
                    f"{path} belongs to a model of another shape: its {name} is {shapes.get(name, 'missing')}, "
                    f"the recipe's is {list(tensor.shape)}"
                )
        try:
            self.model.load_state_dict(weights)
            for optimizer, its_state in zip(self.optimizers, saved, strict=True):
                optimizer.load_state_dict(its_state)
        except (RuntimeError, ValueError, LookupError):
            raise ValueError(f"{path} was written by another optimizer: choose it with --optimizer") from None


def export(model: Transformer, tokenizer: Path, folder: Path) -> None:
    """Write the model in bf16 and its tokenizer as a Hugging Face folder, replacing what was there."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    save_hugging_face(model, partial, dtype=torch.bfloat16)
    (partial / "model.safetensors").chmod(0o644)  # safetensors leaves it to its owner alone
    shutil.copyfile(tokenizer, partial / "tokenizer.model")
    (partial / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def initial_weights(model: Transformer, folder: Path, tokenizer: Path) -> None:
    """Take the weights of an exported folder, and its tokenizer where WORK has none; ValueError if they do not fit."""
    source = load_model(folder, dtype=torch.float32)
    if source.config != model.config:
        raise ValueError(f"{folder} holds a model of another shape than the recipe's")
    stored = folder / "tokenizer.model"
    if not stored.is_file():
        raise ValueError(f"{folder} has no tokenizer.model")
    if not tokenizer.exists():
        write_whole(tokenizer, stored.read_bytes())
    if tokenizer.read_bytes() != stored.read_bytes():
        raise ValueError(f"{tokenizer} is not the tokenizer of {folder}: start in an empty --work")
    model.load_state_dict(source.state_dict())


def rewind_log(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop what the log says about steps after the checkpoint (a kill lost them) -> the records that stay."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:  # the kill came while it was written
            break
    records = [record for record in records if record["step"] <= step]
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))
    return records


# ---- the loop ------------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("train_bundled.py", __doc__)
    add = parser.add_argument
    # fmt: off
    add("--books", type=Path, help="folder of UTF-8 text files to train on")
    add("--work", type=Path, required=True, help="folder for tokenizer, checkpoints, log and export")
    add("--recipe", choices=tuple(RECIPES), default="bundled",
        help="bundled: the shipped model; test: a minutes-long miniature for checking the pipeline (default: bundled)")
    add("--tokens", type=float, help="tokens to train in all; may be changed on resuming (default: the recipe's)")
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--seed", type=int, default=0)
    add("--init-from", metavar="FOLDER", type=Path,
        help="start from an exported model; ignored once there is a checkpoint")
    add("--minutes", type=float, default=math.inf, help="stop cleanly after this long; resume later")
    add("--save-every", metavar="SECONDS", type=float, default=120.0, help="between checkpoints (default: 120)")
    add("--export-only", action="store_true", help="write WORK/model from the checkpoint, and train nothing")
    # fmt: on
    args = parser.parse_args(argv)
    if args.books is None and not args.export_only:
        parser.error("--books is required unless --export-only is given")
    return args


def average_gradients(model: nn.Module, world: int) -> None:
    """Replace every gradient by its mean over the processes, in one all-reduce."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = parameters_to_vector(grads)
    dist.all_reduce(flat)
    vector_to_parameters(flat / world, grads)


def train(training: Training, recipe: Recipe, books: Books, pieces: Pieces, args: argparse.Namespace) -> None:
    """Take steps until all tokens are seen or the minutes are over; checkpoints are saved on the way and at the end."""
    model, total = training.model, args.tokens or recipe.tokens
    device = model.embedding.weight.device
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    peak_rates = [[group["lr"] for group in fresh.param_groups] for fresh in make_optimizers(model, args.optimizer)]
    checkpoint, log_path = args.work / "checkpoint.pt", args.work / "log.jsonl"
    records = rewind_log(log_path, training.step) if rank == 0 else []
    minutes_before, running = (records[-1]["minutes"], records[-1]["loss"]) if records else (0.0, math.nan)
    compiled_loss_of = torch.compile(loss_of, dynamic=False)
    started = saved_at = time.monotonic()

    def go_on() -> bool:
        in_time = torch.tensor(int(time.monotonic() - started < args.minutes * 60), device=device)
        if world > 1 and args.minutes < math.inf:
            dist.broadcast(in_time, src=0)  # one clock decides for all
        return training.tokens < total and bool(in_time)

    bar = tqdm(total=total, initial=training.tokens, unit="tok", unit_scale=True, disable=rank > 0, smoothing=0.02)
    while go_on():
        done = training.tokens / total
        stage = recipe.stage(done)
        scale = learning_rate_scale(training.step, done)
        for optimizer, rates in zip(training.optimizers, peak_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale

        tokens, pos = batch(training.step, rank, stage, books, pieces, args.seed, recipe.config.max_seq_len)
        step_loss = compiled_loss_of if stage.context <= recipe.compiled_context else loss_of
        loss = step_loss(model, tokens.to(device), pos.to(device))
        loss.backward()
        if world > 1:
            average_gradients(model, world)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        taken = world * stage.context * stage.sequences
        training.step += 1
        training.tokens += taken
        now = loss.item()
        running = now if math.isnan(running) else 0.98 * running + 0.02 * now
        bar.update(taken)
        bar.set_postfix(loss=f"{running:.3f}", context=stage.context, refresh=False)
        if rank == 0 and training.step % 25 == 0:
            minutes = minutes_before + (time.monotonic() - started) / 60
            record = {"step": training.step, "tokens": training.tokens, "context": stage.context,
                      "loss": round(running, 4), "minutes": round(minutes, 2)}  # fmt: skip
            if training.step % recipe.held_out_every == 0:
                record["held_out"] = round(held_out_loss(model, books, pieces, recipe.stages[0].context, device), 4)
            with log_path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")
        if rank == 0 and time.monotonic() - saved_at > args.save_every:
            training.save(checkpoint)
            saved_at = time.monotonic()
    if rank == 0:
        training.save(checkpoint)
    bar.close()


def run(args: argparse.Namespace) -> None:
    """Train, or go on training, and export."""
    recipe = RECIPES[args.recipe]
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    tokenizer, checkpoint, exported = args.work / "tokenizer.model", args.work / "checkpoint.pt", args.work / "model"

    torch.manual_seed(args.seed)
    model = Transformer(recipe.config)
    initialise(model)
    model.to(device)
    training = Training(model, make_optimizers(model, args.optimizer))
    if args.export_only:
        training.load(checkpoint, device)
        export(model, tokenizer, exported)
        return

    paths = book_paths(args.books)
    args.work.mkdir(parents=True, exist_ok=True)
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    if checkpoint.exists():
        training.load(checkpoint, device)
    if rank == 0:
        if args.init_from and not checkpoint.exists():
            initial_weights(model, args.init_from, tokenizer)
        if not tokenizer.exists():
            train_tokenizer(paths, tokenizer, recipe.config.vocab_size)
    if world > 1:
        dist.barrier()
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
    pieces = Pieces(tokenizer)
    books = Books(paths, pieces, args.work / "tokens")
    contexts = [stage.context for stage in recipe.stages]
    books.require(training=max(contexts) + 1, held_out=contexts[0] + 1)
    train(training, recipe, books, pieces, args)
    if rank == 0:
        export(model, tokenizer, exported)
    if world > 1:
        dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    with refusing("train_bundled.py"):
        run(args)


if __name__ == "__main__":
    main()
