"""The CPU's distributions, and what a round draws, keeps and commits in C++, with each instruction set.

Against plain Python and the operations of PyTorch that they replace, rounds bit for bit.

Shapes: B rows, V vocabulary, gamma drafts per row.
"""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from gpt_fast_sd import SamplingParams, sampling
from gpt_fast_sd import fast as kernels
from gpt_fast_sd.acceptance import AcceptResult
from gpt_fast_sd.bodies import CORE, Bodies
from gpt_fast_sd.draft import Draft
from gpt_fast_sd.fast.cpu import stand_ins
from gpt_fast_sd.round import accept_step
from gpt_fast_sd.sampling import GREEDY, Kind
from gpt_fast_sd.state import BatchState
from tests.gpt_fast_sd.fast.rows import expected, full_of_ties, paired, rows_of_every_kind
from tests.gpt_fast_sd.fast.test_cpu_any import instructions  # noqa: F401  a fixture
from tests.helpers import few, table_of

pytestmark = pytest.mark.usefixtures("instructions")

LARGE = 49_152
FILTERS = [
    {}, {"top_p": 0.95}, {"top_p": 0.999999}, {"top_p": 1e-9}, {"top_k": 50}, {"top_k": 1}, {"min_p": 0.05},
    {"min_p": 1.0}, {"top_k": LARGE - 1, "top_p": 0.9}, {"top_k": 3000, "top_p": 0.97, "min_p": 0.01},
    {"top_k": 20_000},  # more than there are sets' best ones
]  # fmt: skip


def spread(logits: Tensor, top_k: list[int], top_p: list[float], *, min_p: float = 0.0, by: float = 1.0) -> Tensor:
    """The kernel's distributions of rows [B, V] at one temperature."""
    n = len(logits)
    filters = torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64)
    least = torch.full((n,), min_p, dtype=torch.float64).log()
    return kernels.cpu_distributions(logits, torch.full((n,), by), *filters, least)


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
    held = table_of([SamplingParams(temperature=0.8, **params)] * len(logits), LARGE)  # type: ignore[arg-type]
    p = stand_ins.probabilities(logits, held)
    scores = (logits - logits.amax(-1, keepdim=True)) / 0.8
    cut, last = (x[:, None] for x in kernels.likeliest(scores, held.top_k, held.top_p))
    kept = (scores > cut) | ((scores == cut) & (torch.arange(LARGE) <= last))
    kept &= scores >= held.min_p.log()[:, None]
    truth = scores.double().masked_fill(~kept, -math.inf).softmax(-1)
    assert not p[~kept].any()
    torch.testing.assert_close(p.double(), truth, rtol=4e-7, atol=1e-37)


def test_a_temperature_near_0_and_greedy_rows_among_others_are_one_hot_at_the_best_token() -> None:
    logits = torch.randn(3, LARGE)
    logits[:, [77, 40_000]] = 9.0
    held = table_of([SamplingParams(temperature=1e-30, top_p=0.5)] * 3, LARGE)
    held.temperature[1] = 0.0
    p = sampling.probabilities(logits, held)
    assert p[1].nonzero().tolist() == p[0].nonzero().tolist() == [[77]]  # ties go to the lowest id
    held.top_p[2] = 1.0
    assert sampling.probabilities(logits, held)[2].nonzero().tolist() == [[77], [40_000]]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_drawn_and_judged_as_it_is_alone_on_any_threads_to_the_last_bit(threads: int) -> None:
    logits = torch.randn(9, LARGE) * 3
    top_k, top_p = [LARGE, 50, LARGE] * 3, [0.95, 1.0, 1.0] * 3
    u = torch.rand(9)
    torch.set_num_threads(threads)
    together = spread(logits, top_k, top_p, by=0.8)
    tokens = kernels.cpu_draw(together, u)
    for i in range(9):
        alone = spread(logits[i : i + 1], top_k[i : i + 1], top_p[i : i + 1], by=0.8)
        assert alone[0].equal(together[i]) and kernels.cpu_draw(alone, u[i : i + 1]) == tokens[i]
    p, q, seed = torch.randn(6, 4, LARGE).softmax(-1), torch.randn(6, 3, LARGE).softmax(-1), torch.arange(6)
    given = p, q, torch.randint(LARGE, (6, 3)), torch.full((6,), 3), seed, seed * 7
    judged = kernels.cpu_judge_sampled(*given, accept=2, own=0)
    for i in range(6):
        one = kernels.cpu_judge_sampled(*(x[i : i + 1] for x in given), accept=2, own=0)
        assert [x.item() for x in one] == [x[i].item() for x in judged]


def test_a_row_that_holds_nan_is_nan_and_alone_in_it() -> None:
    logits = torch.randn(3, LARGE)
    fine = logits.clone()
    logits[0], logits[2, 1::2] = math.nan, math.nan
    for top_k, top_p in ((LARGE, 1.0), (40, 1.0), (LARGE, 0.9), (40, 0.9)):
        p = spread(logits, [top_k] * 3, [top_p] * 3)
        assert p[[0, 2]].isnan().any(-1).all()
        assert p[1].equal(spread(fine, [top_k] * 3, [top_p] * 3)[1])
        assert ((kernels.cpu_draw(p, torch.rand(3)) >= 0) & (kernels.cpu_draw(p, torch.rand(3)) < LARGE)).all()


# ---- rounds ----------------------------------------------------------------------------------------------------------

HISTORY, EOS = 40, (2, 5)
VOCABULARIES = [1, 7, 255, 256, 257, 4096, 5003]

IN_CPP = ("draw", "uniform", "verify_greedy", "judge_sampled", "commit")
CPP = Bodies(**{name: getattr(stand_ins, name) for name in IN_CPP})


def states(n_rows: int, gamma: int, n_vocab: int, seed: int) -> tuple[BatchState, BatchState]:
    """The same rows in the middle of their texts, some done, some near their end: for kernels, and for PyTorch."""
    rng = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    state = BatchState.idle(torch.zeros(n_rows, dtype=torch.int64), HISTORY, n_vocab, EOS[: whole(0, 2)], bodies=CPP)
    for slot in range(n_rows):
        prompt = torch.randint(n_vocab, (whole(1, HISTORY - gamma - 2),), generator=rng).tolist()
        params = SamplingParams(max_tokens=whole(1, gamma + 3), ignore_eos=slot % 3 == 1, temperature=slot % 4 / 2)
        state.assign(slot, prompt, params, seed=whole(-(2**40), 2**40))
        if slot % 5 == 3:
            state.free(slot)
    fields = [(f.name, getattr(state, f.name)) for f in dataclasses.fields(state)]
    copies = {name: x.clone() for name, x in fields if isinstance(x, Tensor)}
    return state, dataclasses.replace(state, bodies=CORE, **copies)


def draft_of(state: BatchState, gamma: int, *, drawn: bool, logits: Tensor, seed: int) -> Draft:
    """Drafts of which many stay: some rows fewer than gamma, where drawn with a q that is not far from p."""
    rng = torch.Generator().manual_seed(seed)
    n_rows, n_vocab = len(state.pending), state.vocab_size
    tokens = logits[:, :gamma].argmax(-1)
    other = torch.randint(n_vocab, tokens.shape, generator=rng)
    tokens = torch.where(torch.rand(n_rows, gamma, generator=rng) < 0.7, tokens, other)
    noise = torch.randn(n_rows, gamma, n_vocab, generator=rng)
    q = (logits[:, :gamma].nan_to_num(0.0, 0.0, 0.0) + noise * 0.3).softmax(-1) if drawn else None
    count = torch.randint(gamma + 1, (n_rows,), generator=rng) if seed % 2 else torch.full((n_rows,), gamma)
    who = torch.randint(3, (n_rows, gamma), generator=rng) if seed % 3 == 0 else None
    return Draft(tokens, q, count, who)


@pytest.mark.parametrize("n_vocab", VOCABULARIES)
@pytest.mark.parametrize("kind", [GREEDY, Kind(True, False)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("gamma", [0, 1, 4, 16])
def test_a_round_is_accepted_and_committed_as_by_pytorch(gamma: int, kind: Kind, n_vocab: int) -> None:
    for seed in range(8):
        n_rows = 1 + seed * 2
        ours, theirs = states(n_rows, gamma, n_vocab, seed)
        logits = torch.randn(n_rows, gamma + 1, n_vocab, generator=torch.Generator().manual_seed(seed))
        if seed % 3 == 1:  # ties
            logits = logits.round()
        if seed % 4 == 2 and n_vocab > 3:
            logits[0, 0, 1::2] = math.nan
            logits[-1, -1] = logits[2, -1] = math.nan  # rows 1 and 2 sample
            logits[1, 0, ::3] = math.nan
            logits[-1, 0, :2] = -math.inf
        draft = draft_of(ours, gamma, drawn=kind.sampled and seed % 2 == 0, logits=logits, seed=seed)
        rows = [accept_step(state, kind, logits, draft, None) for state in (ours, theirs)]
        assert rows[0].equal(rows[1]) and rows[0].shape == (n_rows, 2 * gamma + 5)
        for name in ("seq_len", "pending", "history", "active", "remaining"):
            assert getattr(ours, name).equal(getattr(theirs, name)), name


@pytest.mark.parametrize("n_vocab", [*VOCABULARIES, LARGE])
def test_the_best_token_is_the_first_of_the_largest_and_nan_is_larger(n_vocab: int) -> None:
    logits = torch.randn(12, 1, n_vocab).mul(4).round()
    for row, place in ((1, 0), (2, n_vocab // 2), (3, n_vocab - 1)):
        logits[row, 0, place:] = math.nan
    logits[4], logits[5], logits[6, 0, -1], logits[7, 0, 0] = -math.inf, math.nan, math.inf, -math.inf
    logits[8], logits[9, 0, -1] = 0.0, -0.0
    logits[8, 0, 0] = -0.0
    none = torch.zeros(12, 0, dtype=torch.int64)
    n_accepted, best = kernels.cpu_judge_greedy(logits, none, torch.zeros(12, dtype=torch.int64))
    assert best.equal(logits[:, 0].argmax(-1)) and not n_accepted.any()


def test_a_slice_of_wider_logits_is_judged_as_its_copy() -> None:
    logits, drafted = torch.randn(3, 9, 300), torch.randint(300, (3, 4))
    most = torch.tensor([4, 0, 2])
    drafted[0] = logits[0, :4].argmax(-1)
    got, expected = (kernels.cpu_judge_greedy(x, drafted, most) for x in (logits[:, :5], logits[:, :5].clone()))
    assert got[0].equal(expected[0]) and got[1].equal(expected[1])
    assert got[0].tolist()[:2] == [4, 0]


def test_a_draft_that_is_impossible_is_refused_even_where_its_own_q_is_0() -> None:
    p, drafted, one = torch.eye(8)[[1, 1]][None], torch.tensor([[3]]), torch.ones(1, dtype=torch.int64)
    got = kernels.cpu_judge_sampled(p, torch.eye(8)[[2]][None], drafted, one, one, one, accept=2, own=0)
    assert [x.tolist() for x in got] == [[0], [1]]


def test_a_row_without_room_for_a_round_is_refused_and_nothing_is_written() -> None:
    state, before = states(2, 3, 11, 0)
    state.seq_len[1] = HISTORY - 4
    result = AcceptResult(torch.tensor([3, 3]), torch.tensor([1, 1]))
    with pytest.raises(IndexError, match="1 of 2 rows have no room for 4 more tokens"):
        state.commit(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 3]), result)
    assert state.history.equal(before.history) and state.remaining.equal(before.remaining)


@pytest.mark.parametrize("n_vocab", [1, 16, 255, 256, 257, 5000, LARGE])
def test_a_draw_is_the_first_token_where_the_running_sum_exceeds_u(n_vocab: int) -> None:
    """So none of probability 0 is drawn, not even where the sum rounds."""
    p = torch.rand(200, n_vocab) * (torch.rand(200, n_vocab) < 0.3)
    p[1::3, : n_vocab // 3] = p[1::3, -(n_vocab // 3) :] = 0.0
    p[:, n_vocab // 2] += 0.01  # some token is possible
    p[2::3] = 0.1 * (p[2::3] > 0)  # whose sum rounds
    u = torch.rand(200)
    u[:60:2], u[1:60:2] = 0.0, 1 - 2.0**-24
    running = p.double().cumsum(-1)
    truth = (running <= u.double()[:, None] * running[:, -1:]).sum(-1)
    assert kernels.cpu_draw(p, u).equal(truth)


@pytest.mark.parametrize("n_vocab", [*VOCABULARIES, LARGE])
@pytest.mark.parametrize("u", [0.0, 0.25, 1 - 2.0**-24])
def test_where_no_token_is_possible_the_draw_is_pytorch_s(n_vocab: int, u: float) -> None:
    p = torch.rand(4, n_vocab)
    p[0], p[1], p[2, -1], p[3, n_vocab // 2] = 0.0, math.nan, math.nan, math.nan
    drawn = kernels.cpu_draw(p, torch.full((4,), u))
    assert drawn.equal(sampling.draw(p, torch.full((4,), u)))
    assert drawn.tolist() == [n_vocab - 1, 0, 0, 0]


@pytest.mark.parametrize("stream", range(5))
def test_random_numbers_have_the_bits_that_tensors_give(stream: int) -> None:
    seed = torch.cat([torch.tensor([0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63)]), torch.randint(2**62, (93,))])
    for pos in (torch.arange(100), torch.randint(2**40, (100, 7)), torch.randint(9, (100, 8))[:, :-1]):
        row = seed if pos.dim() == 1 else seed[:, None]
        assert kernels.cpu_uniform(seed, pos, stream).equal(sampling.uniform(row, pos, stream))
    assert kernels.cpu_uniform(seed, torch.zeros(100, 0, dtype=torch.int64), stream).shape == (100, 0)
    assert kernels.cpu_uniform(seed[:0], torch.zeros(0, 3, dtype=torch.int64), stream).shape == (0, 3)
