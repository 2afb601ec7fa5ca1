"""The net of tests/net.py holds what was frozen, and says so when it does not."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.net import CELLS, FROZEN, differences, mark, measure

NET = Path(__file__).with_name("net.py")
FEW = ("streaming", "hierarchy")
NAMES = [*(f"tiny fp32 same eager {policy}" for policy in FEW), "tiny fp32 int8 eager quantized"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of several threads may have other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("cell", NAMES)
def test_an_eager_cell_in_fp32_does_what_was_frozen(cell: str) -> None:
    frozen = json.loads(FROZEN.read_text())["avx2"]
    by, found = differences(cell, frozen[cell], measure(cell), frozen["mark"] == mark())
    assert by in ("bits", "tokens") and found == []


def test_every_cell_is_frozen_and_none_failed() -> None:
    frozen = json.loads(FROZEN.read_text())
    assert {kind: ["mark", *cells] for kind, cells in CELLS.items()} == {kind: [*of] for kind, of in frozen.items()}
    assert not any("error" in found for of in frozen.values() for found in of.values())


def test_a_value_that_moved_is_one_line_unless_it_depends_on_the_machine() -> None:
    cell, expected = "tiny bf16 same eager off", {"greedy tokens 0": [1, 2], "logits": ["a"], "compiled graphs": 1}
    got = {"greedy tokens 0": [1, 3], "logits": ["b"], "compiled graphs": 2}
    assert differences(cell, expected, got, True) == ("bits", [
        f"{cell}: greedy tokens 0: expected [1, 2], got [1, 3]",
        f"{cell}: logits: expected ['a'], got ['b']",
        f"{cell}: compiled graphs: expected 1, got 2",
    ])  # fmt: skip
    assert differences(cell, expected, got, False) == ("counts", [f"{cell}: compiled graphs: expected 1, got 2"])
    assert differences(cell.replace("bf16", "fp32"), expected, got, False)[0] == "tokens"
    assert differences(cell, expected, {}, True)[1][-1] == f"{cell}: compiled graphs: expected 1, got None"


@pytest.mark.slow
def test_no_cell_has_moved() -> None:
    done = subprocess.run([sys.executable, NET, "--check"], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
