"""Whether two outputs are equal, and if not, how close the logits were."""

import math
from dataclasses import replace

import pytest
import torch

from measuring.lossless import Difference, differences, first_difference, logits_after, near_tie
from tests.helpers import random_ids, tiny_model, whole_text_logits


@pytest.mark.parametrize(
    ("ours", "theirs", "at"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0)],
)
def test_outputs_part_where_the_first_token_differs_or_one_ends(ours: list[int], theirs: list[int], at: int) -> None:
    assert first_difference(ours, theirs) == at


def test_a_difference_is_told_with_both_tokens_and_the_gap_of_their_logits() -> None:
    asked: list[list[int]] = []

    def logits(ids: list[int]) -> torch.Tensor:
        asked.append(ids)
        return torch.tensor([0.0, 1.0, 3.0, 2.5])

    outputs = [(0, [7], [1, 2], [1, 2]), (4, [7, 8], [2, 2], [2, 3]), (5, [9], [1], [1, 0])]
    assert differences(outputs, logits) == [Difference(4, 1, 2, 3, 0.5, 3.0), Difference(5, 1, None, 0, 3.0, 3.0)]
    assert asked == [[7, 8, 2], [9, 1]]
    assert [one.gap for one in differences(outputs, logits, seconds=0.0)] == [None, None]


def test_a_near_tie_is_one_in_the_coarser_dtype() -> None:
    one = Difference(0, 0, 1, 2, gap=0.2)
    assert one.is_near_tie("fp32", "bf16") and not one.is_near_tie("fp32", "fp16")
    assert not any(replace(one, gap=gap).is_near_tie("bf16") for gap in (math.inf, math.nan, None))


@pytest.mark.parametrize(("best", "limit"), [(-40.0, 1.0), (0.0, 0.25), (15.9, 0.25), (16.0, 0.5), (40.0, 1.0)])
def test_a_near_tie_grows_with_the_last_place_of_the_best_logit(best: float, limit: float) -> None:
    assert near_tie(best, "bf16") == limit


def test_the_logits_after_a_text_are_those_of_its_last_token() -> None:
    model, ids = tiny_model(), random_ids(30)
    torch.testing.assert_close(logits_after(model, ids, 3), whole_text_logits(model, ids)[-3:])
