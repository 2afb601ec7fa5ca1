"""N-gram lookup: the tokens that followed the row's last ones where those occurred before; no model, no cache.

Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), after Yang et al. 2023
(arXiv 2304.04487).

Shapes: B slots, S places of text in view, L layers, K kv heads, gamma tokens drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpt_fast_sd.model import SPLIT, Transformer
from gpt_fast_sd.tp import Group

from ..draft import Draft
from ..state import BatchState, RoundPlan
from ..steps import Runner
from .config import DraftConfig
from .policy import DraftPolicy


def look_up(text: Tensor, last: Tensor, ngram: int, gamma: int) -> tuple[Tensor, Tensor]:
    """The tokens after the longest earlier match of a row's last ones, at most ngram of them; ties go to the latest.

    text int64 [B, S], of which text[:, : last + 1] is written; last [B] -> int64 [B, gamma], bool [B] whether anything
    matched. If fewer than gamma tokens follow the match, they repeat: the text continues with its period.
    """
    n_places = text.shape[1]
    place = torch.arange(n_places, device=text.device)  # [S]
    matches = place < last[:, None]  # [B, S], so far, of the match that ends at each place
    score = torch.zeros_like(text)  # [B, S], length of the match, then place
    for back in range(min(ngram, n_places)):
        wanted = text.gather(1, (last - back).clamp(min=0)[:, None])  # [B, 1]
        matches[:, :back] = False
        matches[:, back:] &= text[:, : n_places - back] == wanted
        score = torch.where(matches, (back + 1) * n_places + place, score)
    best = score.amax(1)  # [B]
    end = best % n_places  # [B]
    period = (last - end).clamp(min=1)[:, None]
    index = end[:, None] + 1 + torch.arange(gamma, device=text.device) % period  # [B, gamma]
    return text.gather(1, index), best >= n_places


class LookupDraft(DraftPolicy):
    """Drafts from the row's own text, prompt and output alike."""

    about = "no model"
    reads = "what followed the same words earlier in the text"
    flags = ("ngram",)
    proposers = ("lookup",)

    @classmethod
    def build(
        cls, config: DraftConfig, target: Runner, draft_model: Transformer | None, draft_group: Group
    ) -> LookupDraft:
        """Build a draft from n-grams of the target's texts."""
        return cls(target, config.ngram)

    @classmethod
    def searches(cls, config: DraftConfig) -> bool:
        """True: it does nothing else."""
        return True

    def __init__(self, target: Runner, ngram: int) -> None:
        self.target, self.ngram = target, ngram

    def propose(self, state: BatchState, plan: RoundPlan) -> Draft:
        """gamma tokens if anything matched, else none; deterministic."""
        in_view = self.target.cache.splits(plan.n_keys) * SPLIT
        last = state.seq_len.clamp(max=in_view - 1)  # an idle slot may hold more text than any live one
        tokens, matched = look_up(state.history[:, :in_view], last, self.ngram, plan.gamma)
        return Draft(tokens, None, plan.gamma * matched)

    def positions_read(self, pos: Tensor) -> Tensor:
        """No positions: bool [L, B, K, S], all False."""
        n_layers, n_slots, n_kv = self.target.shape
        n_places = self.target.cache.layers[0].k.shape[2]
        return torch.zeros(n_layers, n_slots, n_kv, n_places, dtype=torch.bool, device=pos.device)
