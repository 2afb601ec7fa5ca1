"""A round of speculative decoding: draft, verify, judge, commit. The host reads nothing inside it.

Shapes: B slots, T tokens in this call, L layers, K kv heads, V vocabulary, gamma tokens drafted a round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_fast_sd.model import CacheLayer, Transformer

from .attending import DenseKV
from .compiling import CompiledStep, span, varying
from .config import MAX_GAMMA, DraftConfig
from .devices import ways_of
from .kernels import cpu_attention_fits, triton_serves
from .packing import all_packed
from .policies import Draft, DraftPolicy
from .reader import Reader
from .replay import Replay
from .rows import Rows
from .sampling import ACCEPT_STREAM, TARGET_STREAM

Lap = Callable[[], None]


class Round:
    """The target's steps over all slots, and the round that is made of them and of a policy's drafts."""

    def __init__(
        self, target: Reader, rows: Rows, policy: DraftPolicy | None, draft: DraftConfig, *, width: int = 0
    ) -> None:
        """width: tokens that every step of the target feeds (0: as many as needed).

        A width also fixes the view to all of the cache: then no sum hangs on what else is in the batch.
        """
        self.target, self.rows, self.policy, self.draft, self.width = target, rows, policy, draft, width
        self.replay: Replay | None = None
        self.any_threads = width > 0 and sums_by_row(target)
        compiled = target.compiled
        if self.any_threads and isinstance(compiled, dict):
            compiled = {**compiled, "cpp.threads": 1}  # of generated loops, which may share a long sum among threads
        self.decode = CompiledStep(decode_step, compiled=compiled)  # one token a slot
        self.verify = CompiledStep(decode_step, compiled=compiled)  # several
        compiles_sampling = ways_of(target.device).compiles_sampling
        self.judge = CompiledStep(judge_step, compiled=target.compiled if compiles_sampling else None)

    def device_round(self, gamma: int, lap: Lap = lambda: None) -> Tensor:
        """One round, nothing of which the host reads -> int64 [B, 2 * gamma + 5]; lap is called between its parts."""
        rows, policy = self.rows, self.policy
        if policy and gamma:
            draft = policy.propose(rows, gamma)
        else:
            draft = Draft(rows.pending.new_empty(len(rows.pending), 0), None, torch.zeros_like(rows.pending))
        lap()
        logits, mass = self.feed(torch.cat([rows.pending[:, None], draft.tokens], 1), rows.n_keys + gamma)
        lap()
        result = self.judged(logits[:, : gamma + 1], draft)
        if policy and gamma:
            policy.device_after_verify(rows, mass)
        return result

    def feed(self, tokens: Tensor, n_keys: int) -> tuple[Tensor, Tensor | None]:
        """Feed tokens [B, T] from each slot's seq_len on, at least n_keys keys in view -> logits [B, T, V], mass."""
        cache, wanted = self.target.cache, self.width or tokens.shape[1]
        tokens = torch.cat([tokens, tokens.new_zeros(tokens.shape[0], wanted - tokens.shape[1])], 1)
        # a slot without a request scribbles behind what can ever be in view, and so costs no reading of keys
        start = torch.where(self.rows.active, cache.seq_len, cache.capacity)  # [B]
        pos = start[:, None] + torch.arange(wanted, device=tokens.device)  # [B, T]
        step, page = (self.decode, 0) if wanted == 1 else (self.verify, self.page)
        if step is self.verify and not self.width:
            varying(tokens, pos)
        in_view = span(cache, self.in_view(n_keys))
        # with several threads a library may sum one row of a product otherwise than the next
        with one_thread() if self.width and not self.any_threads else contextlib.nullcontext():
            out: tuple[Tensor, Tensor | None] = step(
                self.target.model, tokens, pos, cache.layers, in_view, page, variant=page
            )
        return out

    def judged(self, logits: Tensor, draft: Draft) -> Tensor:
        """Judge and commit: logits [B, gamma + 1, V] -> int64 [B, 2 * gamma + 5], see judge_step.

        Compiled it is one graph for each kind of sampling and each of three lengths: no draft, one, and more.
        """
        rows, width, beside = self.rows, logits.shape[1], (draft.q, draft.proposer, self.replay)
        if width > 2:
            varying(logits, min=3)
            varying(*(x for x in (draft.tokens, draft.q, draft.proposer) if x is not None), max=MAX_GAMMA)
        variant = (min(width, 3), rows.sampled, rows.filtered, *(x is not None for x in beside))
        result: Tensor = self.judge(rows, logits, draft, self.replay, variant=variant)
        return result

    def in_view(self, n_keys: int) -> int:
        """Keys to have in view: with a fixed width all of the cache, so that sums never change their order."""
        return self.target.cache.capacity if self.width else n_keys

    @property
    def keys_read(self) -> int:
        """Keys that each slot reads in a step, on average: what the step takes hangs on them."""
        return self.rows.mean_keys if reads_own_keys(self.target) else self.rows.n_keys

    @property
    def page(self) -> int:
        """Keys whose attention mass the verification sums for the policy, 0 where it wants none."""
        own = getattr(self.policy, "page", None)  # of one that was set, and that selects by its own
        return (own or self.draft.page) if self.policy and self.policy.wants_mass else 0

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return self.decode.graphs + self.verify.graphs + self.judge.graphs

    def keep_steps(self, before: Round) -> None:
        """Go on with what earlier rounds of the same target have compiled."""
        self.decode, self.verify, self.judge = before.decode, before.verify, before.judge
        self.replay = before.replay


def decode_step(
    model: Transformer, tokens: Tensor, pos: Tensor, layers: list[CacheLayer], in_view: Tensor, page: int
) -> tuple[Tensor, Tensor | None]:
    """Store, attend to everything and judge: tokens, pos [B, T] -> fp32 logits [B, T, V] after each of them.

    in_view [n_splits, 0] carries, as a size that may vary without a recompile, how many key splits are in view. With a
    page, the attention mass that each block of so many keys received comes too: fp32 [L, B, K, n_keys // page].
    """
    kv = DenseKV(layers, in_view, page)
    logits = model(tokens, pos, kv).float()  # [B, T, V]
    return logits, torch.stack(kv.mass) if page else None


def judge_step(rows: Rows, logits: Tensor, draft: Draft, replay: Replay | None) -> Tensor:
    """Judge and commit: logits [B, gamma + 1, V] -> int64 [B, 2 * gamma + 5], all that the host has to read of a round.

    A row holds what Rows.commit gives, then who proposed each draft, then the first draft that was refused, if one was.
    """
    cap = torch.minimum(draft.count, rows.remaining - 1).clamp(min=0)  # [B]
    pos = rows.seq_len[:, None] + torch.arange(logits.shape[1], device=logits.device)  # [B, gamma + 1]
    # a token's randomness hangs on its row's seed and its position alone
    verdict, _ = rows.judge(logits, pos, draft.tokens, draft.q, cap, accept=ACCEPT_STREAM, own=TARGET_STREAM)
    if replay is not None:
        verdict = replay.apply(verdict, draft.tokens, cap)
    by_whom = draft.proposer if draft.proposer is not None else torch.zeros_like(draft.tokens)  # [B, gamma]
    # commit puts the next token in its place
    refused = F.pad(draft.tokens, (0, 1)).gather(1, verdict.n_accepted[:, None])  # [B, 1]
    return torch.cat([rows.commit(draft.tokens, cap, verdict), by_whom, refused], 1)


def reads_own_keys(target: Reader) -> bool:
    """Whether the target's steps attend by kernels of ours: these read each row's own keys and no others.

    What attends otherwise reads for every row, idle ones too, as many keys as the longest one has in view.
    """
    keys, compiled = target.cache.layers[0].k, target.compiled is not None and target.compiled is not False
    return triton_serves(target.device) or (compiled and cpu_attention_fits(keys, keys))


def sums_by_row(target: Reader) -> bool:
    """Whether compiled steps of a model on a CPU multiply and attend by our kernels alone.

    A row's sums are each made in one place there, so that its bits do not depend on threads. Of several processes it is
    not said: what adds their parts is a library's.
    """
    keys = target.cache.layers[0].k
    ours = isinstance(target.compiled, dict) and target.group.size == 1 and cpu_attention_fits(keys, keys)
    return ours and all_packed(target.model)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch's CPU operators run on one thread meanwhile."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
