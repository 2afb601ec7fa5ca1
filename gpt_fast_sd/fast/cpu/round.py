"""round.cpp: what a round draws, keeps and commits, each in one call where PyTorch takes many small operators.

What traced steps may need, draws and random numbers, are torch operators; the others are called only by eager code.

Shapes: B batch rows, T positions of a row, V vocabulary, gamma drafts per row, S places of history.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from .build import builds, constant_where_traced, library

SOURCE = Path(__file__).with_name("round.cpp")

_library = torch.library.Library("gpt_fast_sd", "FRAGMENT")
_library.define("cpu_draw(Tensor p, Tensor u) -> Tensor")
_library.define("cpu_uniform(Tensor seed, Tensor position, int stream) -> Tensor")


@constant_where_traced
def available() -> bool:
    """Whether the kernel can be built here, or is."""
    return builds(SOURCE)


def cpu_draw(p: Tensor, u: Tensor) -> Tensor:
    """The token where the running sum first exceeds u: fp32 p [B, V], fp32 u [B] in [0, 1) -> int64 [B]."""
    tokens: Tensor = torch.ops.gpt_fast_sd.cpu_draw(p, u)
    return tokens


def cpu_uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """sampling.uniform, bit for bit: int64 [B], int64 [B] or [B, T] -> fp32 of the latter's shape."""
    numbers: Tensor = torch.ops.gpt_fast_sd.cpu_uniform(seed, position, stream)
    return numbers


def cpu_judge_greedy(logits: Tensor, drafted: Tensor, max_accept: Tensor) -> tuple[Tensor, Tensor]:
    """acceptance.verify_greedy: fp32 logits [B, gamma + 1, V], int64 drafted [B, gamma], max_accept [B].

    -> n_accepted, next_token int64 [B]
    """
    n_rows, width, n_vocab = logits.shape
    assert logits.dtype == torch.float32 and _whole(drafted, n_rows, width - 1) and _whole(max_accept, n_rows)
    logits, drafted, max_accept = logits.contiguous(), drafted.contiguous(), max_accept.contiguous()
    n_accepted, next_token = torch.empty_like(max_accept), torch.empty_like(max_accept)
    kernels().judge_greedy_any(
        logits.data_ptr(), drafted.data_ptr(), max_accept.data_ptr(), n_accepted.data_ptr(), next_token.data_ptr(),
        n_rows, width - 1, n_vocab, torch.get_num_threads(),
    )  # fmt: skip
    return n_accepted, next_token


def cpu_judge_sampled(
    p: Tensor, q: Tensor | None, drafted: Tensor, max_accept: Tensor, seed: Tensor, seq_len: Tensor, *, accept: int,
    own: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """acceptance.verify_sampled: fp32 p [B, gamma + 1, V], q [B, gamma, V], int64 drafted [B, gamma], the others [B].

    q None: each draft was certain. The numbers are uniform's of these seeds, of positions from seq_len on, and of the
    streams accept and own. -> n_accepted, next_token int64 [B]
    """
    n_rows, width, n_vocab = p.shape
    assert p.dtype == torch.float32 and _whole(drafted, n_rows, width - 1)
    assert q is None or (q.dtype == torch.float32 and q.shape == (n_rows, width - 1, n_vocab))
    assert all(_whole(x, n_rows) for x in (max_accept, seed, seq_len))
    p, q, drafted = p.contiguous(), None if q is None else q.contiguous(), drafted.contiguous()
    max_accept, seed, seq_len = max_accept.contiguous(), seed.contiguous(), seq_len.contiguous()
    n_accepted, next_token = torch.empty_like(max_accept), torch.empty_like(max_accept)
    kernels().judge_sampled_any(
        p.data_ptr(), None if q is None else q.data_ptr(), drafted.data_ptr(), max_accept.data_ptr(), seed.data_ptr(),
        seq_len.data_ptr(), n_accepted.data_ptr(), next_token.data_ptr(), accept, own, n_rows, width - 1, n_vocab,
        torch.get_num_threads(),
    )  # fmt: skip
    return n_accepted, next_token


def cpu_commit(
    drafted: Tensor, max_accept: Tensor, n_accepted: Tensor, next_token: Tensor, proposer: Tensor | None,
    eos_ids: Tensor, stop_on_eos: Tensor, *, seq_len: Tensor, pending: Tensor, history: Tensor, remaining: Tensor,
    active: Tensor,
) -> Tensor:  # fmt: skip
    """acceptance.commit, which says what is what; those that are named are written in place.

    IndexError for a row without room in its history; then nothing was written.
    """
    n_rows, gamma = drafted.shape
    columns = max_accept, n_accepted, next_token, seq_len, pending, remaining
    assert all(_whole(x, n_rows) for x in columns) and _whole(drafted, n_rows, gamma)
    assert proposer is None or _whole(proposer, n_rows, gamma)
    assert all(x.is_contiguous() for x in (seq_len, pending, history, remaining, active, eos_ids))
    drafted, proposer = drafted.contiguous(), None if proposer is None else proposer.contiguous()
    max_accept, n_accepted, next_token = max_accept.contiguous(), n_accepted.contiguous(), next_token.contiguous()
    rows = drafted.new_empty(n_rows, 2 * gamma + 5)
    wrong = kernels().commit_any(
        drafted.data_ptr(), max_accept.data_ptr(), n_accepted.data_ptr(), next_token.data_ptr(),
        None if proposer is None else proposer.data_ptr(), eos_ids.data_ptr(), stop_on_eos.data_ptr(),
        seq_len.data_ptr(), pending.data_ptr(), history.data_ptr(), remaining.data_ptr(), active.data_ptr(),
        rows.data_ptr(), n_rows, gamma, history.shape[1], len(eos_ids),
    )  # fmt: skip
    if wrong:
        raise IndexError(f"{wrong} of {n_rows} rows have no room for {gamma + 1} more tokens in their history")
    return rows


def _whole(x: Tensor, *shape: int) -> bool:
    return x.dtype == torch.int64 and x.shape == shape


@functools.cache
def kernels() -> ctypes.CDLL:
    """The kernels in C++."""
    built = library(SOURCE)()
    pointer, size, threads = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    built.uniform_any.argtypes = [pointer] * 3 + [size] * 3
    built.draw_any.argtypes = [pointer] * 3 + [size] * 2 + [threads]
    built.judge_greedy_any.argtypes = [pointer] * 5 + [size] * 3 + [threads]
    built.judge_sampled_any.argtypes = [pointer] * 8 + [size] * 5 + [threads]
    built.commit_any.argtypes, built.commit_any.restype = [pointer] * 13 + [size] * 4, size
    for kernel in (built.uniform_any, built.draw_any, built.judge_greedy_any, built.judge_sampled_any):
        kernel.restype = None
    return built


@torch.library.impl(_library, "cpu_draw", "CPU")
def _draw(p: Tensor, u: Tensor) -> Tensor:
    assert p.dtype == u.dtype == torch.float32 and len(p) == len(u)
    p, u = p.contiguous(), u.contiguous()
    tokens = p.new_empty(len(p), dtype=torch.int64)
    kernels().draw_any(p.data_ptr(), u.data_ptr(), tokens.data_ptr(), *p.shape, torch.get_num_threads())
    return tokens


@torch.library.impl(_library, "cpu_uniform", "CPU")
def _uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    assert seed.dtype == position.dtype == torch.int64 and seed.shape == position.shape[:1]
    seed, position = seed.contiguous(), position.contiguous()
    numbers = position.new_empty(position.shape, dtype=torch.float32)
    n_rows = len(seed)
    each = position.numel() // n_rows if n_rows else 0
    kernels().uniform_any(seed.data_ptr(), position.data_ptr(), numbers.data_ptr(), n_rows, each, stream)
    return numbers


@torch.library.register_fake("gpt_fast_sd::cpu_draw", lib=_library)  # type: ignore[untyped-decorator]
def _draw_fake(p: Tensor, u: Tensor) -> Tensor:
    return u.new_empty(u.shape, dtype=torch.int64)


@torch.library.register_fake("gpt_fast_sd::cpu_uniform", lib=_library)  # type: ignore[untyped-decorator]
def _uniform_fake(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    return position.new_empty(position.shape, dtype=torch.float32)
