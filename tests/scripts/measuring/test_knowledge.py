"""How far logits are from a reference's."""

from __future__ import annotations

import math

import pytest
import torch

from evaluate import distance


def test_the_logits_that_are_compared_are_those_of_the_tokens_that_came() -> None:
    own, theirs = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [3.0, 1.0]])
    found = distance("book", torch.tensor([0, 1]), own, theirs)
    nll = math.log1p(math.exp(-2.0))
    assert found["perplexity"] == pytest.approx(math.exp(nll))
    assert found["same_best"] == 0.5
    # centred: own +-1, +-1 and theirs +-0.5, +-1, the second the other way round
    assert found["logit_error"] == pytest.approx(math.sqrt((0.25 + 4.0) / 2) / math.sqrt((0.25 + 1.0) / 2))
    shifted = distance("book", torch.tensor([0, 1]), own + 5.0, theirs)
    assert shifted["logit_error"] == pytest.approx(found["logit_error"])  # a constant changes no choice
