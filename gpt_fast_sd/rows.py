"""The slots as tensors: what a round reads and writes on the device, so that the host looks once, when it is over.

Shapes: B slots, T tokens in this call, S tokens of history a slot, V vocabulary, gamma tokens drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .config import SamplingParams
from .judging import Verdict
from .sampling import SamplingTable, draw, filters_anything, probabilities, uniform


class Rows:
    """B slots: the pending token (emitted, not yet fed), the text so far, and what may still be emitted.

    seq_len is the cache's own tensor: positions before it are committed, the pending token will be fed at it.
    """

    def __init__(self, seq_len: Tensor, history_len: int, vocab_size: int, eos_ids: Sequence[int]) -> None:
        n, device = seq_len.shape[0], seq_len.device
        self.seq_len = seq_len  # int64 [B]
        self.vocab_size = vocab_size
        self.pending = torch.zeros(n, dtype=torch.int64, device=device)  # [B]
        self.history = torch.zeros(n, history_len, dtype=torch.int64, device=device)  # [B, S] committed, then pending
        self.active = torch.zeros(n, dtype=torch.bool, device=device)  # [B] a request is being decoded
        self.remaining = torch.zeros(n, dtype=torch.int64, device=device)  # [B] tokens that may still be emitted
        self.heeds_eos = torch.zeros(n, dtype=torch.bool, device=device)  # [B]
        self.eos_ids = torch.tensor(list(eos_ids), dtype=torch.int64, device=device)
        self.table = SamplingTable.empty(n, vocab_size, device)
        self.lengths: dict[int, int] = {}  # on the host: committed positions of each live slot
        self.round = 0  # on the host: rounds begun
        self.n_keys = 1  # on the host: keys in use once the longest row's pending token is fed
        self.sampled = self.filtered = False  # on the host: whether any live request samples, or filters

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

    def look(self, lengths: Mapping[int, int], params: Sequence[SamplingParams]) -> None:
        """A round begins: take what the host knows of the live requests, committed positions by slot and parameters."""
        self.round += 1
        self.lengths = dict(lengths)
        self.n_keys = max(lengths.values()) + 1
        self.sampled = any(p.temperature > 0 for p in params)
        self.filtered = filters_anything(params)

    def probabilities(self, logits: Tensor) -> Tensor:
        """What each row samples from: logits [B, V] or [B, T, V] -> fp32, the same shape."""
        return probabilities(logits, self.table, filtered=self.filtered)

    def uniform(self, pos: Tensor, stream: int) -> Tensor:
        """A number in [0, 1) for each row's seed and position: int64 [B] or [B, T] -> fp32, the same shape."""
        seed = self.table.seed if pos.dim() == 1 else self.table.seed[:, None]
        return uniform(seed, pos, stream)

    def choose(self, logits: Tensor, pos: Tensor, stream: int) -> tuple[Tensor, Tensor | None]:
        """A token a row after position pos [B]: logits [B, V] -> tokens [B], and q [B, V] where any row samples."""
        if not self.sampled:
            return logits.argmax(-1), None
        q = self.probabilities(logits)
        return draw(q, self.uniform(pos, stream)), q

    def commit(self, drafted: Tensor, cap: Tensor, verdict: Verdict) -> Tensor:
        """Keep the accepted prefix and the next token: seq_len grows by n_accepted + 1, less what EOS or the end cuts.

        drafted [B, gamma]; cap [B] drafts that counted -> int64 [B, gamma + 4], all that the host has to read: tokens
        emitted, drafts judged, drafts accepted, then the tokens (those past the emitted ones mean nothing).
        """
        gamma = drafted.shape[1]
        step = torch.arange(gamma + 1, device=drafted.device)  # [gamma + 1]
        at = verdict.n_accepted[:, None]  # [B, 1]
        tokens = torch.cat([drafted, drafted.new_zeros(drafted.shape[0], 1)], 1)  # [B, gamma + 1]
        tokens = torch.where(step == at, verdict.next_token[:, None], tokens)
        emitted = torch.minimum(verdict.n_accepted + 1, self.remaining)  # [B]
        ends = torch.isin(tokens, self.eos_ids) & self.heeds_eos[:, None] & (step < emitted[:, None])
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
