"""Prompts to measure with: stretches of texts, rows that wrap around one text, ragged ones, random tokens."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpt_fast_sd.model import ModelConfig, Tokenizer, load_tokenizer

CONTEXT = 4096  # tokens of a prompt if no length is given
END = 512  # tokens at the end of a stretch that are averaged on their own
LONGEST_TEXT = 2**28  # bytes: more than any model has positions for
MOST_RANDOM = 1 << 24  # random tokens, which longer rows go round


def read_text(path: Path) -> str:
    """A UTF-8 file as text, without a byte order mark; ValueError or OSError in one sentence."""
    with path.open("rb") as file:
        found = file.read(LONGEST_TEXT + 1)  # /dev/zero has no end
    if len(found) > LONGEST_TEXT:
        raise ValueError(f"{path} has more than {LONGEST_TEXT:,} bytes")
    try:
        return io.TextIOWrapper(io.BytesIO(found), "utf-8-sig").read()
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        what = f"byte {error.start}, in line {line:,}, is {error.object[error.start]:#04x}"
        raise ValueError(f"{path} is not UTF-8 text: {what}") from None


def digest(ids: Sequence[Any]) -> str:
    """A short name that changes with the tokens."""
    return short_name(json.dumps(list(ids)).encode())


def short_name(data: bytes) -> str:
    """16 hexadecimal digits that change with the data."""
    return hashlib.sha256(data).hexdigest()[:16]


def reader_of(model: object, folder: Path, config: ModelConfig) -> Tokenizer:
    """The tokenizer of a model's folder; ValueError, which names the model as the user did, if there is none."""
    if (tokenizer := load_tokenizer(folder, config)) is None:
        raise ValueError(f"{model} has no tokenizer to read the texts with")
    return tokenizer


def tokens_of(path: Path, tokenizer: Tokenizer) -> list[int]:
    """The file's tokens, no BOS; ValueError if there are none."""
    ids = tokenizer.encode(read_text(path), bos=False)
    if not ids:
        raise ValueError(f"{path} is empty: give it some text")
    return ids


def stretches(texts: Mapping[str, Sequence[int]], n: int, length: int, bos: int | None) -> list[list[int]]:
    """n prompts of length tokens, BOS first, each a stretch of the texts in turn; ValueError if one is too short."""
    body = length - (bos is not None)
    cuts = []
    for i, (name, ids) in enumerate(texts.items()):
        share = len(range(i, n, len(texts)))
        if share * body > len(ids):
            raise ValueError(
                f"{name} has {len(ids):,} tokens, but {share} prompt{'s' if share > 1 else ''} of {length:,} "
                f"need{'' if share > 1 else 's'} {share * body:,}: give more text, less context or a smaller batch"
            )
        gap = (len(ids) - share * body) // max(1, share)
        cuts.append([list(ids[j * (body + gap) :][:body]) for j in range(share)])
    first = [] if bos is None else [bos]
    return [first + cuts[row % len(texts)][row // len(texts)] for row in range(n)]


def longest_context(n_tokens: int, batch: int, positions: int) -> int:
    """CONTEXT, or less if text or model are shorter; rounded to hundreds if that leaves enough."""
    most = min(CONTEXT, n_tokens // batch + 1, positions)
    return most if most == CONTEXT or most < 200 else most // 100 * 100


def round_the_text(ids: Sequence[int], n: int, length: int, bos: int | None) -> list[list[int]]:
    """n prompts of length tokens, BOS first.

    Row i begins i / n through the ids and wraps around at their end. A row's shorter prompts are the beginnings of its
    longer ones, so that a slot that holds one need not compute it again.
    """
    first = [] if bos is None else [bos]
    body = length - len(first)
    starts = [i * len(ids) // n for i in range(n)]
    return [first + [ids[(start + i) % len(ids)] for i in range(body)] for start in starts]


def random_text(n: int, vocab_size: int, seed: int) -> list[int]:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (min(n, MOST_RANDOM),), generator=made).tolist()


def ragged(
    texts: Mapping[str, Sequence[int]], n: int, shortest: int, longest: int, bos: int | None, seed: int
) -> list[list[int]]:
    """n prompts of shortest to longest tokens from anywhere in the texts; deterministic in the seed."""
    rng, pool = np.random.default_rng(seed), list(texts.values())
    for name, ids in texts.items():
        if len(ids) < longest:
            raise ValueError(f"{name} has {len(ids):,} tokens, too few for prompts of up to {longest:,}")
    prompts = []
    for _ in range(n):
        length, ids = int(rng.integers(shortest, longest + 1)), pool[int(rng.integers(len(pool)))]
        body = length - (bos is not None)
        start = int(rng.integers(0, len(ids) - body + 1))
        prompts.append([*([] if bos is None else [bos]), *ids[start : start + body]])
    return prompts
