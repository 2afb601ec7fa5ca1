"""The CPU's distributions, with each instruction set, against plain Python and the operations they replace.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import SamplingParams, sampling
from gpt_fast_sd.fast import cpu_distributions, cpu_draw, cpu_sampling_fits, likeliest
from gpt_fast_sd.fast.cpu import instruction_sets as cpu_sets
from gpt_fast_sd.fast.cpu import sampling as kernel
from gpt_fast_sd.fast.cpu import stand_ins
from gpt_fast_sd.sampling import SamplingTable
from tests.gpt_fast_sd.fast.rows import expected, full_of_ties, paired, rows_of_every_kind
from tests.gpt_fast_sd.fast.test_cpu import forced
from tests.helpers import few

pytestmark = pytest.mark.usefixtures("instructions")

LARGE = 49_152
FILTERS = [
    {},
    {"top_p": 0.95},
    {"top_p": 0.999999},
    {"top_p": 1e-9},
    {"top_k": 50},
    {"top_k": 1},
    {"top_k": LARGE - 1, "top_p": 0.9},
    {"top_k": 20_000},  # more than there are sets' best ones
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 3000, "top_p": 0.97, "min_p": 0.01},
]


@pytest.fixture(scope="module", params=[one for one in cpu_sets.SETS if not one.own], ids=lambda one: one.name)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.param.has():
        pytest.skip(f"no {request.param.name} here")
    with forced(request.param.name):
        if not kernel.available():
            pytest.skip("no compiler here builds the kernel")
        yield


def spread(logits: Tensor, top_k: list[int], top_p: list[float], *, min_p: float = 0.0, by: float = 1.0) -> Tensor:
    """The kernel's distributions of rows [B, V] at one temperature."""
    n = len(logits)
    filters = torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64)
    return cpu_distributions(logits, torch.full((n,), by), *filters, torch.full((n,), min_p, dtype=torch.float64).log())


def table(params: SamplingParams, n_rows: int, n_vocab: int) -> SamplingTable:
    made = SamplingTable.empty(n_rows, n_vocab, torch.device("cpu"))
    for slot in range(n_rows):
        made.assign(slot, params, slot, n_vocab)
    return made


@pytest.mark.parametrize("n_vocab", few([1, 2, 15, 17, 100, 300, 529], [2, 17, 300]))
def test_kept_is_what_plain_python_keeps(n_vocab: int) -> None:
    each, top_k, top_p = paired(rows_of_every_kind(n_vocab), ("1e-12", "0.1", "0.5", "0.73", "0.9", "0.999", "1"))
    p = spread(each, top_k, [float(x) for x in top_p])
    # a token that weighs less than fp32 can hold is kept with a share of 0
    for share, kept, row in zip(p, expected(each, top_k, top_p), each, strict=True):
        stays = torch.zeros(n_vocab, dtype=torch.bool)
        stays[kept] = True
        truth = row.double().masked_fill(~stays, -math.inf).softmax(-1)
        torch.testing.assert_close(share.double(), truth, rtol=4e-7, atol=1e-37)  # two roundings of fp32
        assert not share[~stays].any()


def test_ties_are_cut_as_plain_python_cuts_them() -> None:
    scores, top_k, top_p = full_of_ties(2000, 37)
    p = spread(scores, top_k, [float(x) for x in top_p])
    assert [row.nonzero()[:, 0].tolist() for row in p] == expected(scores, top_k, top_p)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_a_large_vocabulary_is_cut_as_the_search_cuts_it(params: dict[str, float]) -> None:
    logits = torch.cat([rows_of_every_kind(LARGE), torch.randn(4, LARGE) * 2.5, torch.randn(2, LARGE).bfloat16()])
    held = table(SamplingParams(temperature=0.8, **params), len(logits), LARGE)  # type: ignore[arg-type]
    p = stand_ins.probabilities(logits, held)
    scores = (logits - logits.amax(-1, keepdim=True)) / 0.8
    cut, last = (x[:, None] for x in likeliest(scores, held.top_k, held.top_p))
    kept = (scores > cut) | ((scores == cut) & (torch.arange(LARGE) <= last))
    kept &= scores >= held.min_p.log()[:, None]
    truth = scores.double().masked_fill(~kept, -math.inf).softmax(-1)
    assert cpu_sampling_fits(logits) and not p[~kept].any()
    torch.testing.assert_close(p.double(), truth, rtol=4e-7, atol=1e-37)


def test_a_temperature_near_0_and_greedy_rows_among_others_are_one_hot_at_the_best_token() -> None:
    logits = torch.randn(3, LARGE)
    logits[:, [77, 40_000]] = 9.0
    held = table(SamplingParams(temperature=1e-30, top_p=0.5), 3, LARGE)
    held.temperature[1] = 0.0
    p = sampling.probabilities(logits, held)
    assert p[1].nonzero().tolist() == p[0].nonzero().tolist() == [[77]]  # ties go to the lowest id
    held.top_p[2] = 1.0
    assert sampling.probabilities(logits, held)[2].nonzero().tolist() == [[77], [40_000]]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_depends_neither_on_its_batch_nor_on_threads_to_the_last_bit(threads: int) -> None:
    logits = torch.randn(9, LARGE) * 3
    top_k, top_p = [LARGE, 50, LARGE] * 3, [0.95, 1.0, 1.0] * 3
    u = torch.rand(9)
    torch.set_num_threads(threads)
    together = spread(logits, top_k, top_p, by=0.8)
    tokens = cpu_draw(together, u)
    for i in range(9):
        alone = spread(logits[i : i + 1], top_k[i : i + 1], top_p[i : i + 1], by=0.8)
        assert alone[0].equal(together[i]) and cpu_draw(alone, u[i : i + 1]) == tokens[i]


def test_a_row_that_holds_nan_is_nan_and_alone_in_it() -> None:
    logits = torch.randn(3, LARGE)
    fine = logits.clone()
    logits[0], logits[2, 1::2] = math.nan, math.nan
    for top_k, top_p in ((LARGE, 1.0), (40, 1.0), (LARGE, 0.9), (40, 0.9)):
        p = spread(logits, [top_k] * 3, [top_p] * 3)
        assert p[[0, 2]].isnan().any(-1).all()
        assert p[1].equal(spread(fine, [top_k] * 3, [top_p] * 3)[1])
        assert ((cpu_draw(p, torch.rand(3)) >= 0) & (cpu_draw(p, torch.rand(3)) < LARGE)).all()


def test_a_small_vocabulary_needs_no_compiler() -> None:
    assert not cpu_sampling_fits(torch.zeros(8, 4096)) and cpu_sampling_fits(torch.zeros(1, LARGE))
    assert not cpu_sampling_fits(torch.zeros(8, LARGE, device="meta"))
