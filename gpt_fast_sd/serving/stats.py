"""The measurements of a run: totals of the engine, and the statistics of one completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, kw_only=True)
class CompletionStats:
    """The statistics of one prompt.

    A round is one pass of the target. Drafts beyond the end of the output are not counted. By position: how many first,
    second, ... drafts of a round were judged, and accepted.
    """

    rounds: int = 0
    emitted: int = 0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    @property
    def drafted(self) -> int:
        """Drafts judged."""
        return sum(self.drafted_by_position)

    @property
    def accepted(self) -> int:
        """Drafts accepted."""
        return sum(self.accepted_by_position)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per pass of the target."""
        return self.emitted / self.rounds if self.rounds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, derived figures included."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": self.tokens_per_round,
            "drafted_by_position": list(self.drafted_by_position),
            "accepted_by_position": list(self.accepted_by_position),
        }


@dataclass
class EngineStats:
    """Totals of the latest generate or stream call.

    prefill_seconds is the wall time of work on prompts between rounds: keys copied and computed, also those of a
    draft's own cache, which prefill_tokens leaves out. decode_seconds is that of rounds, draft_seconds and
    verify_seconds (of the target's own steps) are parts of it; host_seconds is the rest: judging, commit, text,
    bookkeeping. The parts of a round that is one CUDA graph are not timed: device_seconds has what it took the device,
    by its own clock, and decode_seconds that and the host's time in which the device waits for it, or all the host's,
    whichever is more. None of them knows how long the consumer of the tokens takes.
    kv_bytes counts what attention reads in the rounds, for drafts and the target: every slot, to the end of the last
    split in view. rounds_by_gamma counts the rounds by how many tokens they drafted. recompiles counts graphs compiled
    during the call, compile_seconds is the time of the engine's warm-ups. capture_seconds is the time of capturing
    rounds as CUDA graphs, each when it was first needed; it does not count in decode_seconds.
    """

    compile_seconds: float = 0.0
    capture_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    device_seconds: float = 0.0
    decode_tokens: int = 0
    rounds: int = 0
    row_rounds: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    rounds_by_gamma: dict[int, int] = field(default_factory=dict)
    kv_bytes: int = 0
    recompiles: int = 0

    def count(self, gamma: int, judged: Sequence[int], accepted: Sequence[int]) -> None:
        """Add a round of gamma drafts: how many of each row's were judged and accepted."""
        self.rounds += 1
        self.rounds_by_gamma[gamma] = self.rounds_by_gamma.get(gamma, 0) + 1
        for counts, numbers in ((self.drafted_by_position, judged), (self.accepted_by_position, accepted)):
            counts.extend([0] * (gamma - len(counts)))
            for number in numbers:
                for i in range(number):
                    counts[i] += 1

    def __add__(self, other: EngineStats) -> EngineStats:
        """The sum over two calls; compile_seconds, which calls of one engine share, is the greater one."""
        total = EngineStats()
        for name in (one.name for one in fields(self)):
            ours, theirs = getattr(self, name), getattr(other, name)
            if isinstance(ours, list):
                both: Any = [a + b for a, b in zip_longest(ours, theirs, fillvalue=0)]
            elif isinstance(ours, dict):
                both = {key: ours.get(key, 0) + theirs.get(key, 0) for key in (*ours, *theirs)}
            else:
                both = max(ours, theirs) if name == "compile_seconds" else ours + theirs
            setattr(total, name, both)
        return total

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of judged first, second, ... drafts of a round that was accepted."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted if drafted else 0.0 for accepted, drafted in pairs]

    @property
    def host_seconds(self) -> float:
        """The part of decode_seconds that is neither the draft's nor the target's steps, nor a captured round's."""
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds - self.device_seconds)

    @property
    def drafted(self) -> int:
        """Drafts judged, all rows."""
        return sum(self.drafted_by_position)

    @property
    def accepted(self) -> int:
        """Drafts accepted, all rows."""
        return sum(self.accepted_by_position)

    @property
    def decode_tokens_per_second(self) -> float:
        """Emitted tokens of all rows over decode_seconds."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over prefill_seconds."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens of all rows; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Emitted tokens per row and round."""
        return self.decode_tokens / self.row_rounds if self.row_rounds else 0.0

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values read by rounds, per emitted token."""
        return self.kv_bytes / self.decode_tokens if self.decode_tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, derived figures included."""
        names = (
            "compile_seconds capture_seconds prefill_seconds prefill_tokens prefill_tokens_per_second decode_seconds "
            "host_seconds draft_seconds verify_seconds device_seconds decode_tokens decode_tokens_per_second rounds "
            "drafted accepted acceptance_rate tokens_per_round drafted_by_position accepted_by_position "
            "kv_bytes_per_token recompiles"
        ).split()
        return {
            **{name: getattr(self, name) for name in names},
            "rounds_by_gamma": {str(gamma): n for gamma, n in sorted(self.rounds_by_gamma.items())},
        }
