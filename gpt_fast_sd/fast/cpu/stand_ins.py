"""Bodies in C++ that stand in for functions of the core on a CPU; each has the signature of the one that it stands for.

Shapes: B batch rows, T tokens in this call, S cache capacity, N query heads, K kv heads, H head dim, V vocabulary,
        gamma drafts per row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gpt_fast_sd.model import CacheLayer

from ... import attention
from ...acceptance import AcceptResult
from ...attention import asked_of, entries_listed, page_sums
from ...sampling import SamplingTable
from ..marks import stands_for
from .attention_cpp import PAGE, cpu_attention, cpu_attention_at, cpu_attention_with_mass
from .round import cpu_commit, cpu_draw, cpu_judge_greedy, cpu_judge_sampled, cpu_uniform
from .sampling import cpu_distributions

LAYER, READ = "gpt_fast_sd.model.cache:CacheLayer", "gpt_fast_sd.model.cache:CacheFormat.read"
DENSE = ("gpt_fast_sd.attention:dense", f"{LAYER}.first", f"{LAYER}._entries", f"{LAYER}.buffers", READ)
LISTED = (
    "gpt_fast_sd.attention:listed",
    f"{LAYER}.at",
    f"{LAYER}._entries",
    f"{LAYER}.buffers",
    READ,
    f"{LAYER}.capacity",
)


@stands_for(*DENSE)
def dense(q: Tensor, layer: CacheLayer, pos: Tensor, n_keys: int, page: int = 0) -> tuple[Tensor, Tensor | None]:
    """attention.dense: q [B, N, T, H]; pos [B, T] -> [B, N, T, H], and with a page fp32 [B, K, n_keys // page]."""
    if page % PAGE:  # sums of other blocks
        return attention.dense(q, layer, pos, n_keys, page)
    asked = asked_of(layer, q), layer, pos, n_keys
    if page:
        out, mass = cpu_attention_with_mass(*asked)
        return out.to(q.dtype), page_sums(mass, page // PAGE)
    return cpu_attention(*asked).to(q.dtype), None


@stands_for(*LISTED)
def listed(
    q: Tensor,
    layer: CacheLayer,
    kv_indices: Tensor,
    window_start: Tensor,
    window_width: int,
    pos: Tensor,
    page: int = 1,
) -> Tensor:
    """attention.listed: q [B, N, T, H]; kv_indices [B, K, C]; window_start [B]; pos [B, T] -> [B, N, T, H]."""
    index, limit = entries_listed(layer, kv_indices, window_start, window_width, pos)
    return cpu_attention_at(asked_of(layer, q), layer, index, limit).to(q.dtype)


@stands_for("gpt_fast_sd.sampling:probabilities", "gpt_fast_sd.sampling:SamplingTable.repeated")
def probabilities(logits: Tensor, table: SamplingTable, *, filtered: bool = True) -> Tensor:
    """sampling.probabilities: logits [B, V] or [B, T, V] -> fp32, the same shape."""
    if logits.dim() == 3:
        rows = table if logits.shape[1] == 1 else table.repeated(logits.shape[1])
        return probabilities(logits.flatten(0, 1), rows, filtered=filtered).view(logits.shape)
    return cpu_distributions(logits.float(), table.temperature, table.top_k, table.top_p, table.min_p.log())


@stands_for("gpt_fast_sd.sampling:draw")
def draw(p: Tensor, u: Tensor) -> Tensor:
    """sampling.draw: fp32 p [B, V], u [B] -> int64 [B]."""
    return cpu_draw(p, u)


@stands_for("gpt_fast_sd.sampling:uniform")
def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """sampling.uniform: int64 [B] or [B, 1], int64 [B] or [B, T] -> fp32 of the latter's shape."""
    return cpu_uniform(seed.flatten(), position, stream)


@stands_for("gpt_fast_sd.acceptance:verify_greedy", "gpt_fast_sd.tp.vocab:Vocabulary.argmax")
def verify_greedy(logits: Tensor, drafted: Tensor, max_accept: Tensor, vocabulary: Any = None) -> AcceptResult:
    """acceptance.verify_greedy of a vocabulary that this process holds alone."""
    return AcceptResult(*cpu_judge_greedy(logits, drafted, max_accept))


@stands_for("gpt_fast_sd.acceptance:judge_sampled")
def judge_sampled(
    p: Tensor, q: Tensor | None, drafted: Tensor, max_accept: Tensor, seed: Tensor, seq_len: Tensor, *, accept: int,
    own: int,
) -> AcceptResult:  # fmt: skip
    """acceptance.judge_sampled: p [B, gamma + 1, V], q [B, gamma, V], drafted [B, gamma], the others [B]."""
    return AcceptResult(*cpu_judge_sampled(p, q, drafted, max_accept, seed, seq_len, accept=accept, own=own))


@stands_for("gpt_fast_sd.acceptance:commit")
def commit(
    drafted: Tensor, max_accept: Tensor, result: AcceptResult, proposer: Tensor | None, eos_ids: Tensor,
    stop_on_eos: Tensor, *, seq_len: Tensor, pending: Tensor, history: Tensor, remaining: Tensor, active: Tensor,
) -> Tensor:  # fmt: skip
    """acceptance.commit; IndexError for a row without room in its history, and then nothing was written."""
    return cpu_commit(
        drafted, max_accept, result.n_accepted, result.next_token, proposer, eos_ids, stop_on_eos, seq_len=seq_len,
        pending=pending, history=history, remaining=remaining, active=active,
    )  # fmt: skip
