"""The search for the cut compiled for GPUs that are not there: no spills, many programs per SM, nothing built twice.

Shapes: B rows of scores, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch

from gpt_fast_sd.fast.triton import filters as filters_triton

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpuless.aot import assert_lean
from tests.gpuless.driver import Launch, stand_in

LLAMA_3 = 128_256


def launched(cap: int, n_rows: int, n_vocab: int) -> list[Launch]:
    """The kernels that filtering would launch."""
    with stand_in(cap) as launches, FakeTensorMode():
        scores = torch.empty(n_rows, n_vocab, device="cuda")
        top_k = torch.empty(n_rows, dtype=torch.int64, device="cuda")
        filters_triton.likeliest(scores, top_k, torch.empty(n_rows, dtype=torch.float64, device="cuda"))
    return launches


@pytest.mark.parametrize("cap", [80, 90])
@pytest.mark.parametrize("n_vocab", [LLAMA_3, pytest.param(151_936, marks=pytest.mark.slow)])
def test_the_kernels_are_built_well(n_vocab: int, cap: int) -> None:
    launches = launched(cap, 16, n_vocab)
    for launch in {launch.kernel.name + str(launch.kwargs.get("WEIGHS")): launch for launch in launches}.values():
        assert_lean(launch.compiled, cap)
        assert launch.compiled.registers <= 128  # two programs and more an SM: 64K registers
        assert "LDG.E.128" in launch.compiled.sass or launch.name != "step_kernel"  # scores come 16 bytes at once


def test_a_step_is_one_launch_of_many_programs_per_row() -> None:
    launches = launched(90, 144, LLAMA_3)
    assert [launch.name for launch in launches] == ["step_kernel"] * 16 + ["cut_kernel"]
    assert {launch.grid for launch in launches[:-1]} == {(144, 32)} and launches[-1].grid == (144,)
    assert [launch.kwargs["i_step"] for launch in launches[:-1]] == list(range(16))
    assert [launch.kwargs["WEIGHS"] for launch in launches[:-1]] == [False] * 8 + [True] * 8


def test_neither_steps_nor_rows_rebuild_a_kernel() -> None:
    """Rows: of 1, of 16, one more than before."""
    kernels = [{launch.kernel for launch in launched(90, n_rows, LLAMA_3)} for n_rows in (1, 16, 17, 144)]
    assert all(each == kernels[0] and len(each) == 3 for each in kernels)
