"""Acceptance replay: the real round, keeping as many drafts as a seeded table says, for timing without real weights.

Draft, verification, judging, commit and selection run as always; only the number of accepted drafts is overwritten.
So the seconds are real and the tokens are not: anything measured this way must be called a replay.

Shapes: B slots, gamma tokens drafted per round, R rounds of a table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt_fast_sd.acceptance import AcceptResult
from measuring.roofline import omega

ROW_STD = 0.05  # of a row's acceptance: spread between requests in SpecDecode-Bench's Llama-3.1-8B data
LEAST, MOST = 0.02, 0.999  # limits of the chances of an unusual row
LESS_KEPT = {"float8": 0.99, "int4": 0.97, "planes": 0.97}  # of a draft's chances, by the bundled model


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The chance that the first, second, ... draft of a round is accepted if those before it were; flat after the last.

    source: where it was published, or what it stands for. budget: about how many cache entries drafts read there.
    """

    chances: tuple[float, ...]
    source: str
    budget: int = 512

    def with_weights(self, quantize: str | None) -> Profile:
        """Return the profile for a draft with weights of that precision."""
        less = LESS_KEPT.get(quantize or "", 1.0)
        source = f"{self.source}, times {less:g} for {quantize} weights" if less < 1 else self.source
        return replace(self, chances=tuple(chance * less for chance in self.chances), source=source)

    def rows(self, deviates: Tensor, gamma: int) -> Tensor:
        """The chances of rows this many standard deviations off the mean: [B] -> fp64 [B, gamma]."""
        places = [min(i, len(self.chances) - 1) for i in range(gamma)]
        mean = torch.tensor(self.chances, dtype=torch.float64)[places]  # [gamma]
        return (mean + ROW_STD * deviates.double()[:, None]).clamp(LEAST, MOST)

    def tokens(self, gamma: int) -> float:
        """Expected tokens per round of gamma drafts, over rows with the spread of the table's."""
        quantiles = (torch.arange(256, dtype=torch.float64) + 0.5) / 256
        deviates = torch.special.ndtri(quantiles)
        return sum(omega(gamma, chances) for chances in self.rows(deviates, gamma).tolist()) / len(deviates)


def _line(first: float, last: float) -> tuple[float, ...]:
    return tuple(first + (last - first) * i / 6 for i in range(7))


PROFILES = {
    "low": Profile(chances=_line(0.60, 0.46), source="summaries: long texts that draft badly"),
    "streaming": Profile(chances=_line(0.80, 0.73), source="StreamingLLM 512 on PG-19, arXiv 2408.11049"),
    "snapkv": Profile(budget=2048, chances=_line(0.91, 0.87), source="SnapKV 2049 on PG-19, arXiv 2408.11049"),
    "standalone": Profile(chances=(0.673,), source="Llama-3.2-1B with StreamingLLM 512 for Llama-3.1-8B on PG-19, from "
                          "tokens per round in 2408.11049"),
    "quest": Profile(budget=1024, chances=(0.914,), source="Quest, 7 % of the keys, Qwen3-8B, from tokens per round "
                     "read off a figure, arXiv 2602.07223"),
    "guided": Profile(budget=1024, chances=(0.968, 0.945, 0.928, 0.913, 0.901, 0.894, 0.885),
                      source="selection by the last accepted token, Qwen3-8B, read off a figure, arXiv 2602.07223"),
}  # fmt: skip


def replay_table(profile: Profile, rounds: int, batch: int, gamma: int, seed: int, device: torch.device) -> Tensor:
    """How many drafts each row keeps in each round: int64 [R, B], 0..gamma; deterministic in the seed, everywhere."""
    generator = torch.Generator().manual_seed(seed)
    chances = profile.rows(torch.randn(batch, generator=generator), gamma)  # [B, gamma]
    kept = torch.rand(rounds, batch, gamma, dtype=torch.float64, generator=generator) < chances  # [R, B, gamma]
    return kept.cumprod(-1, dtype=torch.int64).sum(-1).to(device)


class Replay:
    """A table and a place in it, both on the device: a captured graph reads the next row at each of its replays."""

    def __init__(self, table: Tensor) -> None:
        """table: int64 [R, B], see replay_table; it is read cyclically."""
        self.table = table
        self.place = torch.zeros(1, dtype=torch.int64, device=table.device)

    def rewind(self) -> None:
        """Restart at the first row; no host read."""
        self.place.zero_()

    def apply(self, result: AcceptResult, drafted: Tensor, max_accept: Tensor) -> AcceptResult:
        """Keep as many drafts as the table says, at most max_accept [B]: drafted int64 [B, gamma].

        The token after them is the target's own if the real result ended at the same place or every draft is kept, else
        the draft at that place. The host reads nothing here, so it may be part of a captured graph.
        """
        if not drafted.shape[1]:  # plain decoding keeps its place in the table
            return result
        row = self.table.index_select(0, self.place)[0]  # [B]; the host would read a zero-dimensional index
        n_accepted = torch.minimum(row, max_accept)  # [B]
        self.place.copy_((self.place + 1) % self.table.shape[0])
        there = torch.cat([drafted, result.next_token[:, None]], 1)  # [B, gamma + 1]
        drafts = there.gather(1, n_accepted[:, None])[:, 0]  # [B]
        return AcceptResult(n_accepted, torch.where(n_accepted == result.n_accepted, result.next_token, drafts))
