"""A picture of what is read: blank means nothing, solid means all, and each policy can draw itself."""

from __future__ import annotations

import pytest
import torch

from gpt_fast_sd.policies.picture import SHADES, picture
from tests.drafts import VIEWS
from tests.gpt_fast_sd.policies.views_rig import Rig


def test_a_stretch_is_shaded_by_the_share_of_it_that_is_read() -> None:
    mask = torch.zeros(1, 2, 60, dtype=torch.bool)
    mask[0, 0, :10] = mask[0, 0, 10] = mask[0, 0, 20:25] = mask[0, 0, 30:39] = True
    assert picture(mask, width=6).splitlines() == [
        "               0     59",
        "layer 0  head 0 |█░▒▓  | 25",
        "layer 0  head 1 |      | 0",
    ]


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000, 5001])
def test_one_entry_of_many_is_never_blank_and_one_missing_is_never_solid(n: int) -> None:
    lone = torch.eye(n, dtype=torch.bool)[:: max(1, n // 50)][None]  # a line for each of some positions
    for line in picture(lone).splitlines()[1:]:
        bar = line[line.index("|") + 1 : line.rindex("|")]
        assert len(bar) == min(n, 64) and sum(shade != " " for shade in bar) == 1
    for line in picture(~lone).splitlines()[1:]:
        bar = line[line.index("|") + 1 : line.rindex("|")]
        assert sum(shade != "█" for shade in bar) == 1 and set(bar) <= set(SHADES)


@pytest.mark.parametrize("name", VIEWS)
def test_every_policy_draws_itself(name: str) -> None:
    rig = Rig(name, [100, 300, 500, 700], budget=128)
    rig.begin()
    rig.grow([1, 2, 3, 4])
    rig.begin()
    rig.step()
    drawn = picture(rig.reads()[:, 3, :, :705])
    print(f"\n{name}, 128 of 704 entries and the pending one\n{drawn}")
    bars = [line[line.index("|") + 1 : line.rindex("|")] for line in drawn.splitlines()[1:]]
    assert len(bars) == 4 and all(len(bar) == 64 and bar[-1] == "█" for bar in bars)
    blank = sum(bar.count(" ") for bar in bars) / 256
    assert blank == 0 if name == "full" else 0.2 < blank < 0.9
    assert (len(set(bars)) == 1) == (name in ("full", "streaming"))  # the others select by kv head and layer
