"""What n-gram lookup would have drafted, judged by the tokens that came without it: its acceptance without a try.

A draft that was looked up is certain, so it would have been accepted as often as the target's own token equals it,
greedy or sampled (Leviathan et al. 2023, arXiv 2211.17192): trials on the host tell as much as rounds that verify.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

MOST = 4  # drafts of a round that is imagined: of longer ones, rows that accept all would tell little of first drafts
LONGEST = 8  # tokens of the longest match that is looked for: where longer ones differ, they tell nearly the same
Trial = tuple[int, bool]  # how many drafts of its round were accepted before it, and whether it would be


class LookupTrials:
    """One row's text and where its n-grams, of 1 to ngram tokens, last ended; drafts are those of policies.lookup.

    A token of the text takes some 100 bytes for each length of n-grams that are all different.
    """

    def __init__(self, text: Sequence[int], ngram: int, gamma: int = MOST) -> None:
        """text: at least a token. gamma: drafts of a round that is imagined, MOST at most."""
        self.text, self.gamma = array("i", text), min(gamma, MOST)
        last, size, raw = len(text) - 1, self.text.itemsize, self.text.tobytes()
        # but for those that end with the text: they would match themselves
        self._ends = [
            {raw[size * (end + 1 - n) : size * (end + 1)]: end for end in range(n - 1, last)}
            for n in range(1, min(ngram, LONGEST) + 1)
        ]
        self._next = self._accepted = 0  # the place of the text that holds the next draft; 0: nothing matched

    def follow(self, tokens: Iterable[int]) -> list[Trial]:
        """Take tokens that others drafted, or nobody; returns what they tell."""
        trials = []
        for token in tokens:
            if not self._accepted:
                self._next = self._found()
            elif self._accepted == self.gamma:  # the target's own
                self._next = 0
            accepted = self._next > 0 and self.text[self._next] == token
            if self._accepted < self.gamma:
                trials.append((self._accepted, accepted))
            self._accepted = self._accepted + 1 if accepted else 0
            self._append(token)
            self._next += 1
        return trials

    def follow_own(self, tokens: Sequence[int], gamma: int) -> list[Trial]:
        """Take tokens of a round for which lookup drafted gamma; returns what the one after gamma accepted ones tells.

        The others are that round's own to count. The round that was imagined ends.
        """
        self._accepted, at = 0, self._found()
        for token in tokens[:-1]:
            self._append(token)
        trials = [(gamma, self.text[at + gamma] == tokens[-1])] if at and len(tokens) > gamma else []
        for token in tokens[-1:]:
            self._append(token)
        return trials

    def _found(self) -> int:
        for n in range(min(len(self._ends), len(self.text)), 0, -1):
            if (end := self._ends[n - 1].get(self.text[-n:].tobytes())) is not None:
                return end + 1
        return 0

    def _append(self, token: int) -> None:
        last = len(self.text) - 1
        for n, ends in enumerate(self._ends[: last + 1], 1):
            ends[self.text[-n:].tobytes()] = last
        self.text.append(token)
