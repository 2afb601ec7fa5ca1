"""The slots as tensors, and the host's plan of a round, so that the host reads them once, when the round is over.

Shapes: B slots, T tokens in this call, S tokens of history per slot, V vocabulary, gamma tokens drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .acceptance import AcceptResult
from .bodies import CORE, Bodies
from .config import MAX_GAMMA, MOST_LOGPROBS, SamplingParams
from .sampling import GREEDY, WHOLE, Kind, SamplingTable, Vocabulary


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What the host knows about a round when it begins, as of the last result that it read.

    It is made once per round and passed down; a policy with parts derives a plan for each by dataclasses.replace.
    """

    gamma: int  # tokens to draft
    n_keys: int  # at most so many keys are in use once the longest row's pending token is fed
    kind: Kind = GREEDY
    lengths: Mapping[int, int] = field(default_factory=dict)  # committed positions of each live slot
    ahead: int = 0  # tokens that rounds in flight may have added to each of them
    number: int = 0  # of the round
    follows_a_draft: bool = True  # the round before drafted, so no row has grown by more than one round since
    drafted_at: Mapping[int, int] = field(default_factory=dict)  # lengths at the last draft, or when a slot was filled
    captured: bool = False  # the round will be replayed for other rows
    logprobs: int | None = None  # likeliest tokens to name beside each emitted one; None: of none a log-probability

    @classmethod
    def of(
        cls, lengths: Mapping[int, int], params: Sequence[SamplingParams] = (), *, gamma: int = 0, ahead: int = 0,
        number: int = 0, follows_a_draft: bool = True, drafted_at: Mapping[int, int] | None = None,
    ) -> RoundPlan:  # fmt: skip
        """The plan for live rows of these lengths and parameters. drafted_at: None if none has grown since."""
        wanted = [one.logprobs for one in params if one.logprobs is not None]
        return cls(
            gamma=gamma, n_keys=max(lengths.values()) + 1 + ahead, kind=Kind.of(params), lengths=lengths, ahead=ahead,
            number=number, follows_a_draft=follows_a_draft, drafted_at=lengths if drafted_at is None else drafted_at,
            logprobs=MOST_LOGPROBS if any(wanted) else 0 if wanted else None,
        )  # fmt: skip

    def with_gamma(self, gamma: int) -> RoundPlan:
        """Return the plan with so many tokens to draft."""
        return self if gamma == self.gamma else replace(self, gamma=gamma)

    def mean_keys(self, n_slots: int) -> int:
        """Keys in use, averaged over all slots and rounded down: idle ones have none."""
        return (sum(self.lengths.values()) + len(self.lengths) * (1 + self.ahead)) // n_slots

    def any_drafted_within(self, n: int) -> bool:
        """Whether some live row may have last drafted at no more than n committed positions; if captured, some may."""
        return self.captured or any(self.drafted_at[slot] <= n for slot in self.lengths)

    def to_capture(self, n_keys: int) -> RoundPlan:
        """A plan for any rows of up to n_keys keys, about which nothing more is known."""
        return RoundPlan(gamma=self.gamma, n_keys=n_keys, kind=self.kind, captured=True, logprobs=self.logprobs)


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchState:
    """B slots: the pending token (emitted, not yet fed), the text so far, and what may still be emitted.

    A round writes these tensors in place, and captured ones know where they are: none is ever replaced. seq_len is the
    cache's own: positions before it are committed, the pending token will be fed at it.
    """

    seq_len: Tensor  # int64 [B]
    pending: Tensor  # int64 [B]
    history: Tensor  # int64 [B, S] committed, then pending
    active: Tensor  # bool [B] a request is being decoded
    remaining: Tensor  # int64 [B] tokens that may still be emitted
    stop_on_eos: Tensor  # bool [B]
    most_drafts: Tensor  # int64 [B] that it may keep in a round
    eos_ids: Tensor  # int64 [n]
    table: SamplingTable
    vocabulary: Vocabulary = WHOLE  # which rank has which of the target's logits
    vocab_size: int
    bodies: Bodies = CORE  # of what judges, draws and commits

    @staticmethod
    def idle(
        seq_len: Tensor, history_len: int, vocab_size: int, eos_ids: Sequence[int], vocabulary: Vocabulary = WHOLE,
        *, bodies: Bodies = CORE,
    ) -> BatchState:  # fmt: skip
        """As many free slots as seq_len has entries."""
        n, device = seq_len.shape[0], seq_len.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return BatchState(
            seq_len=seq_len, pending=zeros(n), history=zeros(n, history_len), active=zeros(n, dtype=torch.bool),
            remaining=zeros(n), stop_on_eos=zeros(n, dtype=torch.bool), most_drafts=zeros(n) + MAX_GAMMA, bodies=bodies,
            eos_ids=torch.tensor(list(eos_ids), dtype=torch.int64, device=device), vocabulary=vocabulary,
            vocab_size=vocab_size, table=SamplingTable.empty(n, vocab_size, device),
        )  # fmt: skip

    def assign(self, slot: int, prompt: Sequence[int], params: SamplingParams, seed: int) -> None:
        """Give the slot to a request whose prompt, except its last token, is in the cache."""
        self.seq_len[slot] = len(prompt) - 1
        self.history[slot, : len(prompt)] = torch.tensor(list(prompt), device=self.history.device)
        self.pending[slot] = prompt[-1]
        self.remaining[slot] = params.max_tokens
        self.stop_on_eos[slot] = not params.ignore_eos
        self.most_drafts[slot] = MAX_GAMMA if params.max_drafts is None else min(params.max_drafts, MAX_GAMMA)
        self.table.assign(slot, params, seed, self.vocab_size)
        self.active[slot] = True

    def free(self, slot: int) -> None:
        """Free the slot; it idles at position 0, greedy."""
        self.pending[slot] = self.remaining[slot] = 0
        self.active[slot] = False
        self.table.temperature[slot] = 0.0

    def ending_at(self, seq_len: Tensor, pending: Tensor | None = None) -> BatchState:
        """The rows as if seq_len [B] of their tokens were committed and pending [B] came next; all else is shared."""
        return replace(self, seq_len=seq_len, pending=self.pending if pending is None else pending)

    def probabilities(self, logits: Tensor, kind: Kind) -> Tensor:
        """The distribution of each row: logits [B, V] or [B, T, V] -> fp32, the same shape."""
        p: Tensor = self.bodies.probabilities(logits, self.table, filtered=kind.filtered)
        return p

    def choose(
        self, logits: Tensor, pos: Tensor, kind: Kind, stream: int, vocabulary: Vocabulary = WHOLE
    ) -> tuple[Tensor, Tensor | None]:
        """One token per row after position pos [B]: logits [B, V] -> tokens [B], and q [B, V] if any row samples.

        vocabulary: which rank has which tokens' logits, of the target or a draft model. Among ranks that hold a model
        together the first one's draw counts, and so does its q, which may differ from the others' in the last bits.
        """
        if not kind.sampled:
            return vocabulary.argmax(logits), None
        q = self.probabilities(vocabulary.whole(logits), kind)
        (token,) = vocabulary.decided(self.bodies.draw(q, self.bodies.uniform(self.table.seed, pos, stream)))
        return token, q

    def accept(
        self, logits: Tensor, kind: Kind, drafted: Tensor, q: Tensor | None, max_accept: Tensor, *, accept: int,
        own: int,
    ) -> tuple[AcceptResult, Tensor | None]:  # fmt: skip
        """Which drafted [B, T - 1] ~ q [B, T - 1, V] stay, at most max_accept [B]. logits [B, T, V] from seq_len on.

        q None: deterministic drafts. accept and own are the streams that decide on drafts and draw the next token.
        -> the result, and p [B, T, V] if any row samples. As in choose, the first rank's result counts, by its p and q;
        those of the others decide nothing.
        """
        if not kind.sampled:
            return self.bodies.verify_greedy(logits, drafted, max_accept, self.vocabulary), None
        p = self.probabilities(self.vocabulary.whole(logits), kind)
        seeds = self.table.seed, self.seq_len  # a token's randomness depends only on its row's seed and its position
        result = self.bodies.judge_sampled(p, q, drafted, max_accept, *seeds, accept=accept, own=own)
        return AcceptResult(*self.vocabulary.decided(result.n_accepted, result.next_token)), p

    def commit(
        self, drafted: Tensor, max_accept: Tensor, result: AcceptResult, proposer: Tensor | None = None
    ) -> Tensor:
        """Keep the accepted prefix and the next token -> int64 [B, 2 * gamma + 5], see acceptance.commit."""
        rows: Tensor = self.bodies.commit(
            drafted, max_accept, result, proposer, self.eos_ids, self.stop_on_eos, seq_len=self.seq_len,
            pending=self.pending, history=self.history, remaining=self.remaining, active=self.active,
        )  # fmt: skip
        return rows
