"""The slots as tensors: what a round reads and writes on the device, so that the host looks once, when it is over.

Shapes: B slots, T tokens in this call, S tokens of history a slot, V vocabulary, gamma tokens drafted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gpt_fast_sd.tp import Vocabulary

from .config import SamplingParams
from .judging import WHOLE, Verdict, verify_greedy, verify_sampled
from .sampling import SamplingTable, draw, filters_anything, probabilities, uniform


class Rows:
    """B slots: the pending token (emitted, not yet fed), the text so far, and what may still be emitted.

    seq_len is the cache's own tensor: positions before it are committed, the pending token will be fed at it.
    """

    def __init__(
        self,
        seq_len: Tensor,
        history_len: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        vocabulary: Vocabulary = WHOLE,
    ) -> None:
        """vocabulary: who has the target's logits of which tokens."""
        n, device = seq_len.shape[0], seq_len.device
        self.seq_len = seq_len  # int64 [B]
        self.vocab_size, self.vocabulary = vocab_size, vocabulary
        self.pending = torch.zeros(n, dtype=torch.int64, device=device)  # [B]
        self.history = torch.zeros(n, history_len, dtype=torch.int64, device=device)  # [B, S] committed, then pending
        self.active = torch.zeros(n, dtype=torch.bool, device=device)  # [B] a request is being decoded
        self.remaining = torch.zeros(n, dtype=torch.int64, device=device)  # [B] tokens that may still be emitted
        self.heeds_eos = torch.zeros(n, dtype=torch.bool, device=device)  # [B]
        self.eos_ids = torch.tensor(list(eos_ids), dtype=torch.int64, device=device)
        self.table = SamplingTable.empty(n, vocab_size, device)
        # what the host knows, as of the last result that it read
        self.lengths: dict[int, int] = {}  # committed positions of each live slot
        self.ahead = 0  # tokens that rounds still under way may add to a row
        self.round = 0  # rounds begun
        self.n_keys = 1  # keys in use at most, once the longest row's pending token is fed
        self.mean_keys = 1  # keys in use on average of all slots, rounded down: idle ones have none
        self.kernel = False  # whether sampling may run by a kernel that is built here: what runs eagerly starts at once
        self.captured = False  # what runs now will be replayed for other rows
        self.sampled = self.filtered = False  # whether any live request samples, or filters

    def put(self, slot: int, prompt: Sequence[int], params: SamplingParams, seed: int) -> None:
        """Give the slot to a request whose prompt, but for the last token, is in the cache."""
        self.seq_len[slot] = len(prompt) - 1
        self.history[slot, : len(prompt)] = torch.tensor(list(prompt), device=self.history.device)
        self.pending[slot] = prompt[-1]
        self.remaining[slot] = params.max_tokens
        self.heeds_eos[slot] = not params.ignore_eos
        self.table.put(slot, params, seed, self.vocab_size)
        self.active[slot] = True

    def vacate(self, slot: int) -> None:
        """Free the slot; it idles at position 0, greedy."""
        self.pending[slot] = self.remaining[slot] = 0
        self.active[slot] = False
        self.table.temperature[slot] = 0.0

    def look(self, lengths: Mapping[int, int], params: Sequence[SamplingParams], ahead: int = 0) -> None:
        """A round begins: take what the host knows of the live requests, committed positions by slot and parameters.

        ahead: tokens that rounds still under way may add to each row.
        """
        self.round += 1
        self.lengths, self.ahead = dict(lengths), ahead
        self.n_keys = max(lengths.values()) + 1 + ahead
        self.mean_keys = (sum(lengths.values()) + len(lengths) * (1 + ahead)) // len(self.pending)
        self.sampled = any(p.temperature > 0 for p in params)
        self.filtered = filters_anything(params)

    def put_off(self) -> None:
        """The round that was looked at has not begun: it will be looked at again."""
        self.round -= 1

    def any_within(self, n: int) -> bool:
        """Whether some live row may have no more than n committed positions; in a captured round some row may."""
        return self.captured or any(length <= n for length in self.lengths.values())

    @contextlib.contextmanager
    def capturing(self, n_keys: int) -> Iterator[None]:
        """What runs meanwhile is captured, for rows of up to n_keys keys."""
        before, self.n_keys, self.captured = self.n_keys, n_keys, True
        try:
            yield
        finally:
            self.n_keys, self.captured = before, False

    def probabilities(self, logits: Tensor) -> Tensor:
        """What each row samples from: logits [B, V] or [B, T, V] -> fp32, the same shape."""
        return probabilities(logits, self.table, filtered=self.filtered, kernel=self.kernel)

    def uniform(self, pos: Tensor, stream: int) -> Tensor:
        """A number in [0, 1) for each row's seed and position: int64 [B] or [B, T] -> fp32, the same shape."""
        seed = self.table.seed if pos.dim() == 1 else self.table.seed[:, None]
        return uniform(seed, pos, stream)

    def choose(
        self, logits: Tensor, pos: Tensor, stream: int, vocabulary: Vocabulary = WHOLE
    ) -> tuple[Tensor, Tensor | None]:
        """A token a row after position pos [B]: logits [B, V] -> tokens [B], and q [B, V] where any row samples.

        vocabulary: who has these logits, of the target or of a draft model, of which tokens. Of ranks that hold a model
        together the first one's draw counts, and so does its q, which need not be the others' to the last bit.
        """
        if not self.sampled:
            return vocabulary.argmax(logits), None
        q = self.probabilities(vocabulary.whole(logits))
        (token,) = vocabulary.decided(draw(q, self.uniform(pos, stream), kernel=self.kernel))
        return token, q

    def judge(
        self, logits: Tensor, pos: Tensor, drafted: Tensor, q: Tensor | None, cap: Tensor, *, accept: int, own: int
    ) -> tuple[Verdict, Tensor | None]:
        """Which of drafted [B, T - 1] ~ q [B, T - 1, V] stay, at most cap [B], by logits [B, T, V] after pos [B, T].

        q None: drafted without chance. accept and own are the streams that decide on drafts and draw the next token.
        -> the verdict, and p [B, T, V] where any row samples. As in choose, the first rank's verdict counts, by its p
        and q: those of the others decide nothing.
        """
        if not self.sampled:
            return verify_greedy(logits, drafted, cap, self.vocabulary), None
        p = self.probabilities(self.vocabulary.whole(logits))
        if q is None:
            # not F.one_hot, which reads the tokens on the host to check them where torch 2.11 runs it on a CPU
            q = (drafted[..., None] == torch.arange(p.shape[-1], device=p.device)).to(p.dtype)
        accept_u, next_u = self.uniform(pos[:, :-1], accept), self.uniform(pos, own)
        verdict = verify_sampled(p, q, drafted, cap, accept_u, next_u, kernel=self.kernel)
        return Verdict(*self.vocabulary.decided(verdict.n_accepted, verdict.next_token)), p

    def commit(self, drafted: Tensor, cap: Tensor, verdict: Verdict) -> Tensor:
        """Keep the accepted prefix and the next token: seq_len grows by n_accepted + 1, less what EOS or the end cuts.

        drafted [B, gamma]; cap [B] drafts that counted -> int64 [B, gamma + 4], all that the host has to read: tokens
        emitted, drafts judged, drafts accepted, then the tokens (past the emitted ones drafts that go unused).
        """
        gamma = drafted.shape[1]
        step = torch.arange(gamma + 1, device=drafted.device)  # [gamma + 1]
        at = verdict.n_accepted[:, None]  # [B, 1]
        tokens = torch.cat([drafted, drafted.new_zeros(drafted.shape[0], 1)], 1)  # [B, gamma + 1]
        tokens = torch.where(step == at, verdict.next_token[:, None], tokens)
        emitted = torch.minimum(verdict.n_accepted + 1, self.remaining)  # [B]
        # not torch.isin, which compiles for a gamma of its own: how it searches hangs on how many tokens there are
        is_eos = (tokens[..., None] == self.eos_ids).any(-1)  # [B, gamma + 1]
        ends = is_eos & self.heeds_eos[:, None] & (step < emitted[:, None])
        first = torch.where(ends, step, gamma + 1).amin(1)  # [B] index of the first EOS
        emitted = torch.minimum(emitted, first + 1) * self.active
        accepted = torch.minimum(verdict.n_accepted, emitted)
        judged = torch.where(emitted <= verdict.n_accepted, emitted, cap) * self.active
        place = self.seq_len[:, None] + 1 + step  # [B, gamma + 1]
        kept = torch.where(step < emitted[:, None], tokens, self.history.gather(1, place))
        self.history.scatter_(1, place, kept)
        self.seq_len += emitted
        self.remaining -= emitted
        last = tokens.gather(1, (emitted - 1).clamp(min=0)[:, None])[:, 0]
        self.pending.copy_(torch.where(emitted > 0, last, self.pending))
        self.active &= (first > gamma) & (self.remaining > 0)
        return torch.cat([torch.stack([emitted, judged, accepted], 1), tokens], 1)
