"""What tests of tests/gpu hold results against rejects wrong ones; they need a GPU, and docs/gpu.md names them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import fast as kernels
from gpt_fast_sd.acceptance import AcceptResult
from gpt_fast_sd.state import BatchState
from gpt_fast_sd.tp import why_no_cuda
from tests.gpt_fast_sd.fast import references
from tests.gpt_fast_sd.fast.dense import BF16
from tests.gpt_fast_sd.fast.selected import best
from tests.gpu import test_kernels, test_smoke
from tests.gpu.place import Held, Place, difference
from tests.gpu.truths import shortfall
from tests.helpers import Patch

ROOT = Path(__file__).resolve().parents[2]
PLACE = Place(torch.device("cpu"))


@pytest.fixture
def patch() -> Iterator[Patch]:
    """Operators have their references for bodies, as in tests/gpu."""
    with Patch.context() as patch:
        references.as_on_cuda(patch)
        yield patch


@pytest.mark.parametrize("held", [(None, 0), (torch.int8, 0)])
def test_a_kernel_that_reads_one_key_too_few_is_found(held: Held, patch: Patch) -> None:
    right = kernels.decode_attention
    attend = test_kernels.test_few_queries_attend_as_in_fp64_and_pages_get_the_mass_that_was_paid_them
    attend(PLACE, 4, 128, 1, BF16, held)

    def short(q: Tensor, layer: Any, pos: Tensor, *rest: Any) -> Tensor:
        return right(q, layer, (pos - 1).clamp(min=0), *rest)

    patch.setattr(kernels, "decode_attention", short)
    with pytest.raises(AssertionError):
        attend(PLACE, 4, 128, 1, BF16, held)


def test_a_wrong_cut_is_found(patch: Patch) -> None:
    right = kernels.likeliest

    def wrong_of(cut: Any) -> set[tuple[int | None, float]]:
        patch.setattr(kernels, "likeliest", cut)
        found = (test_kernels.miscuts(PLACE, 512, torch.float32, kind) for kind in ("all differ", "ties"))
        return {which for one in found for which, error in one.items() if error > test_kernels.ROUNDING}

    def one_tie_fewer(scores: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
        cut, last = right(scores, top_k, top_p)
        return cut, torch.where(last == scores.shape[1] - 1, last, last - 1)

    assert wrong_of(right) == set()
    assert wrong_of(one_tie_fewer) >= {(50, 0.9), (None, 0.9), (None, 0.0)}
    no_k = wrong_of(lambda scores, top_k, top_p: right(scores, torch.full_like(top_k, scores.shape[1]), top_p))
    assert {(1, 1.0), (50, 1.0), (50, 0.9)} <= no_k and not any(k is None for k, _ in no_k)
    no_p = wrong_of(lambda scores, top_k, top_p: right(scores, top_k, torch.ones_like(top_p)))
    assert {(None, 0.0), (50, 0.9)} <= no_p and not any(p == 1 for _, p in no_p)


def test_what_is_not_finite_or_of_another_shape_is_never_within_a_tolerance() -> None:
    ones = torch.ones(3)
    for out in (torch.tensor([1.0, float("nan"), 1.0]), torch.tensor([1.0, float("inf"), 1.0]), torch.ones(4)):
        assert difference(out, ones) == float("inf") and not test_kernels.near(out, ones, BF16)
    assert difference(ones, ones) == 0.0


def test_the_truth_of_selections_breaks_ties_downwards_and_takes_nan_last() -> None:
    nan = float("nan")
    assert best([1.0, 3.0, nan, 3.0, 3.0], 5, 2) == [1, 3]
    assert best([1.0, nan], 2, 3) == [0, 1, -1]
    q, bounds = torch.ones(1, 1, 1, 2), torch.tensor([[1.0, 1, 0, 0], [3, 3, 0, 0], [2, 2, 0, 0]])[None, None]
    closed = torch.tensor([3])
    assert shortfall(q, bounds, closed, torch.tensor([[[1, 2]]])) == 0.0
    assert shortfall(q, bounds, closed, torch.tensor([[[0, 1]]])) == pytest.approx(0.5)  # of a spread of 4, 2 too few
    assert shortfall(q, bounds, closed, torch.tensor([[[2, 1]]])) == float("inf")  # not in order


def test_the_smoke_test_finds_short_rows_and_text_that_drafting_changes(monkeypatch: Patch) -> None:
    made = test_smoke.made(PLACE, "--prompt", test_smoke.SHORT, "--gamma", "2")
    completions = made.engine.generate(made.prompts, made.greedy)
    assert made.counted(completions)
    with pytest.raises(AssertionError):
        made.counted([replace(one, tokens=one.tokens[:-1]) for one in completions])
    right = BatchState.accept

    def sevens(self: BatchState, *args: Any, **kwargs: Any) -> Any:
        result, p = right(self, *args, **kwargs)
        drafted = args[2]
        own = AcceptResult(result.n_accepted, torch.full_like(result.next_token, 7))
        return own if drafted.shape[1] else result, p

    assert made.both_ways()
    monkeypatch.setattr(BatchState, "accept", sevens)
    with pytest.raises(AssertionError):
        made.both_ways()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_tests_for_a_chip_are_skipped_with_one_reason_where_there_is_none() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "COLUMNS": "400"})
    reasons = {line.partition(": ")[2] for line in run.stdout.splitlines() if line.startswith("SKIPPED")}
    assert reasons == {f"torch sees no CUDA device here: {why_no_cuda()}"}
    counted = re.search(r"^(\d+) skipped, (\d+) deselected", run.stdout, re.M)
    assert counted and int(counted[1]) > 50 and run.returncode == 0


@pytest.mark.slow
def test_a_test_that_takes_too_long_on_a_chip_ends_its_process_and_shows_where(tmp_path: Path) -> None:
    marks = "@pytest.mark.gpu\n@pytest.mark.seconds(1)\n"
    (tmp_path / "test_hangs.py").write_text(f"import time, pytest\n{marks}def test_hangs():\n    time.sleep(60)\n")
    options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "tests.gpu.conftest", "-c", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", *options, "-m", "gpu", str(tmp_path / "test_hangs.py")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and "passed" not in run.stdout
    assert "Timeout (0:00:01)!" in run.stderr and "test_hangs.py" in run.stderr


def test_every_test_that_the_page_of_first_commands_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8"))
    assert len(named) > 15
    for path, name in named:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.M), f"{path}::{name}"
