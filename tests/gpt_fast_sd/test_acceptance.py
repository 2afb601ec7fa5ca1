"""Accepting against slow references in whole numbers, then text: whatever is drafted, it follows the target's law.

Shapes: B batch rows, gamma drafts per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt_fast_sd import SamplingParams
from gpt_fast_sd.acceptance import AcceptResult, verify_greedy, verify_sampled
from gpt_fast_sd.sampling import ACCEPT_STREAM, DRAFT_STREAM, TARGET_STREAM, draw, probabilities, uniform
from tests.helpers import chi_square, table_of

BELOW_1 = 1.0 - 2.0**-24  # the largest number uniform() gives
Accept = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], AcceptResult]

# ---- one result ----------------------------------------------------------------------------------------------------


def best_of(logits: Sequence[float]) -> int:
    """The lowest id of the likeliest."""
    return min(range(len(logits)), key=lambda x: (-logits[x], x))


def slow_greedy(logits: Sequence[Sequence[float]], drafted: Sequence[int], max_accept: int) -> tuple[int, int]:
    """One row: the number of accepted drafts, and the token after them."""
    n = 0
    while n < max_accept and drafted[n] == best_of(logits[n]):
        n += 1
    return n, best_of(logits[n])


def slow_draw(weights: Sequence[Fraction], u: Fraction) -> int:
    """Walk along a line of length sum(weights) until the share u of it lies behind."""
    walked, target = Fraction(0), u * sum(weights)
    for token, weight in enumerate(weights):
        walked += weight
        if walked > target:
            return token
    raise AssertionError("u is 1 or more, or all weights are 0")


def slow_sampled(
    p: Sequence[Sequence[float]],
    q: Sequence[Sequence[float]],
    drafted: Sequence[int],
    max_accept: int,
    accept_u: Sequence[float],
    next_u: Sequence[float],
) -> tuple[int, int]:
    """One row, as Leviathan et al. write it (their algorithm 1), in fractions."""
    target, draft = ([[Fraction(x) for x in row] for row in rows] for rows in (p, q))
    for i, x in enumerate(drafted[:max_accept]):
        ratio = target[i][x] / draft[i][x] if draft[i][x] else Fraction(target[i][x] > 0)
        if Fraction(accept_u[i]) >= min(ratio, Fraction(1)):
            residual = [max(a - b, Fraction(0)) for a, b in zip(target[i], draft[i], strict=True)]
            return i, slow_draw(residual if any(residual) else target[i], Fraction(next_u[i]))
    return max_accept, slow_draw(target[max_accept], Fraction(next_u[max_accept]))


def sixteenths(rng: np.random.Generator, *shape: int) -> Tensor:
    """Distributions in sixteenths, many of them 0: fp32 computes with them exactly, and p(x) = u q(x) does happen."""
    weights = rng.dirichlet([0.5] * shape[-1], size=shape[:-1])
    return torch.from_numpy(rng.multinomial(16, weights)).float() / 16


def outcome(result: AcceptResult) -> list[tuple[int, int]]:
    assert result.n_accepted.dtype == result.next_token.dtype == torch.int64
    return list(zip(result.n_accepted.tolist(), result.next_token.tolist(), strict=True))


SIZES = {
    "n_rows": st.integers(1, 6),
    "gamma": st.integers(0, 5),
    "vocab_size": st.integers(1, 7),
    "seed": st.integers(0, 2**32 - 1),
}


@settings(deadline=None, max_examples=80)
@given(**SIZES)
def test_greedy_verdicts_are_those_of_the_slow_reference(n_rows: int, gamma: int, vocab_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(0, 4, (n_rows, gamma + 1, vocab_size))).float()  # many are equal
    guesses = rng.integers(0, vocab_size, (n_rows, gamma))
    right = logits[:, :gamma].argmax(-1).numpy()
    drafted = torch.from_numpy(np.where(rng.random((n_rows, gamma)) < 0.7, right, guesses))
    max_accept = torch.from_numpy(rng.integers(0, gamma + 1, n_rows))
    rows = zip(logits.tolist(), drafted.tolist(), max_accept.tolist(), strict=True)
    assert outcome(verify_greedy(logits, drafted, max_accept)) == [slow_greedy(*row) for row in rows]


@settings(deadline=None, max_examples=80)
@given(**SIZES)
def test_sampled_verdicts_are_those_of_the_slow_reference(n_rows: int, gamma: int, vocab_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = sixteenths(rng, n_rows, gamma + 1, vocab_size), sixteenths(rng, n_rows, gamma, vocab_size)
    same = torch.from_numpy(rng.random((n_rows, gamma, 1)) < 0.3)
    q = torch.where(same, p[:, :gamma], q)
    drafted = torch.from_numpy(rng.integers(0, vocab_size, (n_rows, gamma)))  # q(x) = 0 as well
    max_accept = torch.from_numpy(rng.integers(0, gamma + 1, n_rows))
    accept_u = torch.from_numpy(rng.integers(0, 16, (n_rows, gamma))).float() / 16
    next_u = torch.from_numpy(rng.integers(0, 16, (n_rows, gamma + 1))).float() / 16
    arguments = (p, q, drafted, max_accept, accept_u, next_u)
    rows = zip(*(x.tolist() for x in arguments), strict=True)
    assert outcome(verify_sampled(*arguments)) == [slow_sampled(*row) for row in rows]


def test_of_equal_logits_only_the_lowest_id_is_accepted() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0]).expand(2, 3, 4)
    result = verify_greedy(logits, torch.tensor([[1, 3], [3, 1]]), torch.tensor([2, 2]))
    assert outcome(result) == [(1, 1), (0, 1)]


def random_round(n_rows: int, gamma: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The six arguments of verify_sampled, with distributions that share some mass, and drafts ~ q."""
    logits = torch.randn(n_rows, gamma + 1, vocab_size)
    p, q = logits.softmax(-1), (logits + 0.7 * torch.randn_like(logits))[:, :gamma].softmax(-1)
    drafted = draw(q.flatten(0, 1), torch.rand(n_rows * gamma)).view(n_rows, gamma)
    max_accept = torch.randint(gamma + 1, (n_rows,))
    return p, q, drafted, max_accept, torch.rand(n_rows, gamma), torch.rand(n_rows, gamma + 1)


@pytest.mark.parametrize("gamma", [1, 4])
def test_a_cap_is_the_same_as_so_many_drafts(gamma: int) -> None:
    n_rows = 200
    p, q, drafted, _, accept_u, next_u = random_round(n_rows, gamma, 9)
    for c in range(gamma + 1):
        max_accept = torch.full((n_rows,), c)
        fewer = verify_sampled(p[:, : c + 1], q[:, :c], drafted[:, :c], max_accept, accept_u[:, :c], next_u[:, : c + 1])
        unread_p, unread_q = p.clone(), q.clone()
        unread_p[:, c + 1 :] = unread_q[:, c:] = float("nan")
        assert outcome(verify_sampled(unread_p, unread_q, drafted, max_accept, accept_u, next_u)) == outcome(fewer)
        fewer = verify_greedy(p[:, : c + 1], drafted[:, :c], max_accept)
        assert outcome(verify_greedy(unread_p, drafted, max_accept)) == outcome(fewer)


@pytest.mark.parametrize("u", [0.0, 0.5, BELOW_1])
def test_a_token_of_probability_0_is_never_emitted(u: float) -> None:
    n_rows, gamma, vocab_size = 2000, 3, 6
    rng = np.random.default_rng(0)
    p, q = sixteenths(rng, n_rows, gamma + 1, vocab_size), sixteenths(rng, n_rows, gamma, vocab_size)
    drafted = torch.randint(vocab_size, (n_rows, gamma))
    result = verify_sampled(
        p,
        q,
        drafted,
        torch.full((n_rows,), gamma),
        torch.full((n_rows, gamma), u),
        torch.full((n_rows, gamma + 1), u),
    )
    p_drafted = p[:, :gamma].gather(-1, drafted[..., None]).squeeze(-1)  # [B, gamma]
    accepted = torch.arange(gamma) < result.n_accepted[:, None]
    assert accepted.any() and not accepted.all() and p_drafted.eq(0).any()
    assert p_drafted[accepted].gt(0).all()
    assert p[torch.arange(n_rows), result.n_accepted, result.next_token].gt(0).all()


def test_a_rejection_that_leaves_no_residual_draws_from_p() -> None:
    p = torch.tensor([[[0.0, 1.0, 0.0, 0.0]] * 2])
    q = torch.tensor([[[0.0, 1.0, 1e-9, 0.0]]])  # sums to 1 in fp32
    for u in (0.0, 0.5, BELOW_1):
        numbers = torch.full((1, 2), u)
        result = verify_sampled(p, q, torch.tensor([[2]]), torch.tensor([1]), numbers[:, :1], numbers)
        assert outcome(result) == [(0, 1)]


@pytest.mark.parametrize("proposer", ["a model", "a lookup"])
def test_a_greedy_row_among_sampled_ones_is_judged_greedily(proposer: str) -> None:
    n_rows, gamma, vocab_size = 300, 3, 12
    params = [SamplingParams(temperature=(0.0, 0.8)[b % 2], top_k=5) for b in range(n_rows)]
    table = table_of(params, vocab_size)
    logits = torch.randn(n_rows, gamma + 1, vocab_size).round(decimals=1)  # some are equal
    draft_logits = logits[:, :gamma] + 0.7 * torch.randn(n_rows, gamma, vocab_size)
    q = probabilities(draft_logits, table)
    if proposer == "a lookup":
        q = torch.zeros_like(q).scatter(-1, draft_logits.argmax(-1, keepdim=True), 1.0)
    drafted = draw(q.flatten(0, 1), torch.rand(n_rows * gamma)).view(n_rows, gamma)
    max_accept = torch.randint(gamma + 1, (n_rows,))
    expected = outcome(verify_greedy(logits, drafted, max_accept))[::2]
    assert {n for n, _ in expected} == {0, 1, 2, 3}
    p = probabilities(logits, table)
    for u in (0.0, 0.5, BELOW_1):
        accept_u, next_u = torch.full((n_rows, gamma), u), torch.full((n_rows, gamma + 1), u)
        assert outcome(verify_sampled(p, q, drafted, max_accept, accept_u, next_u))[::2] == expected


# ---- whole texts: chi-square of the first token, and of the first two together ------------------------------------

N_TEXTS = 60_000
FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 4},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.15},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.03},
    {"temperature": 1.6, "top_k": 6, "min_p": 0.1},
]


def markov_pair(of_target: dict[str, Any], of_draft: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A target, and a draft that is like it, each given the token before, with these parameters: two of [V, V]."""
    target = 1.5 * torch.randn(9, 9)
    pair = (target, of_target), (target + torch.randn(9, 9), of_draft)
    p, q = (probabilities(logits, table_of([SamplingParams(**params)] * 9, 9)) for logits, params in pair)
    return p, q


def written(p: Tensor, q: Tensor, accept: Accept, *, gamma: int = 2, n_tokens: int = 2) -> Tensor:
    """N_TEXTS texts of n_tokens after token 0, in rounds of draft, judge, commit: p, q [V, V] -> int64 [N, n_tokens].

    As in the engine a number belongs to a place in the text, so a rejected draft's place is drafted again with the same
    numbers. Texts differ in how many drafts count.
    """
    seed = torch.arange(N_TEXTS)
    max_accept, index = seed % (gamma + 1), torch.arange(gamma + 1)
    text = torch.zeros(N_TEXTS, 1 + n_tokens * (gamma + 1), dtype=torch.int64)
    length = torch.ones_like(seed)
    for _ in range(n_tokens):
        place = length[:, None] + index  # [N, gamma + 1]
        draft_u, accept_u, next_u = (
            uniform(seed[:, None], place, stream) for stream in (DRAFT_STREAM, ACCEPT_STREAM, TARGET_STREAM)
        )
        chain = [text.gather(1, length[:, None] - 1).squeeze(1)]
        for i in range(gamma):
            chain.append(draw(q[chain[-1]], draft_u[:, i]))
        context = torch.stack(chain, 1)  # [N, gamma + 1]: the pending token, then the drafts
        result = accept(p[context], q[context[:, :-1]], context[:, 1:], max_accept, accept_u[:, :-1], next_u)
        accepted = index < result.n_accepted[:, None]
        text.scatter_(1, place, torch.where(accepted, context.roll(-1, 1), result.next_token[:, None]))
        length += result.n_accepted + 1
    return text[:, 1 : 1 + n_tokens]


def misfit(p: Tensor, text: Tensor) -> tuple[float, float]:
    """How far the first token, and the first two together, are from p [V, V]: above 1 cannot be chance."""
    first, second = text[:, 0], text[:, 1]
    vocab_size = len(p)
    one = chi_square(first.bincount(minlength=vocab_size), p[0] * N_TEXTS)
    pairs = (first * vocab_size + second).bincount(minlength=vocab_size**2)
    both = (p[0, :, None] * p).flatten()
    assert pairs[both == 0].sum() == 0
    return one, chi_square(pairs, both * N_TEXTS)


@pytest.mark.parametrize(
    ("of_target", "of_draft", "gamma"),
    [
        *((params, params, 2) for params in FILTERS),
        (FILTERS[0], FILTERS[0], 1),
        ({"temperature": 0.7, "top_k": 5}, {"temperature": 2.0, "top_k": 3}, 2),
        ({"temperature": 0.9, "top_p": 0.95}, "a lookup", 2),
    ],
    ids=str,
)
def test_speculation_never_changes_the_distribution(of_target: dict[str, Any], of_draft: Any, gamma: int) -> None:
    p, q = markov_pair(of_target, of_target if of_draft == "a lookup" else of_draft)
    if of_draft == "a lookup":
        q = torch.zeros_like(q).scatter(-1, q.argmax(-1, keepdim=True), 1.0)
    assert max(misfit(p, written(p, q, verify_sampled, gamma=gamma))) < 1


def after(n_accepted: Tensor, p: Tensor, q: Tensor, max_accept: Tensor, next_u: Tensor) -> AcceptResult:
    """The right next token, whichever way n_accepted was found."""
    rows = torch.arange(len(p))
    q_next = q[rows, n_accepted.clamp(max=q.shape[1] - 1)] * (n_accepted < max_accept)[:, None]
    return AcceptResult(n_accepted, draw((p[rows, n_accepted] - q_next).clamp(min=0), next_u[rows, n_accepted]))


def count(*arguments: Tensor) -> Tensor:
    return verify_sampled(*arguments).n_accepted  # type: ignore[arg-type]


def at_1(p: Tensor) -> Tensor:
    """A distribution of temperature 0.6 at temperature 1."""
    return p.pow(0.6) / p.pow(0.6).sum(-1, keepdim=True)


# of p, q, drafts, how many may be accepted, and the numbers that accept and that draw
BUGS: dict[str, Accept] = {
    # LongSpec's code does it, not from (p - q)+: drafts that p likes come too often
    "draws from p after a rejection": lambda p, q, x, n, a, u: after(count(p, q, x, n, a, u), p, 0 * q, n, u),
    "subtracts at the cap": lambda p, q, x, n, a, u: after(count(p, q, x, n, a, u), p, q, 0 * n + q.shape[1], u),
    "accepts at another temperature": lambda p, q, x, n, a, u: after(count(at_1(p), at_1(q), x, n, a, u), p, q, n, u),
    "accepts where p is at least q": lambda p, q, x, n, a, u: verify_sampled(p, q, x, n, 0 * a + BELOW_1, u),
    "accepts and draws with one number": lambda p, q, x, n, a, u: verify_sampled(p, q, x, n, u[:, :-1], u),
    "the cap looks at the draft that it cuts off": lambda p, q, x, n, a, u: verify_sampled(
        p, q, x, torch.where(q[:, 0].gather(-1, x[:, :1]).squeeze(1) < 0.3, 0, n), a, u
    ),
}


@pytest.mark.parametrize("bug", [None, *BUGS])
def test_the_chi_square_test_sees_a_planted_bug(bug: str | None) -> None:
    p, q = markov_pair({"temperature": 0.6}, {"temperature": 0.6})
    accept: Accept = lambda p, q, x, n, a, u: after(count(p, q, x, n, a, u), p, q, n, u)  # noqa: E731  the parts
    assert (max(misfit(p, written(p, q, BUGS[bug] if bug else accept))) > 1) == (bug is not None)


# ---- where it runs -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0, 3])
def test_compiled_verdicts_are_the_eager_ones(gamma: int) -> None:
    torch._dynamo.reset()
    arguments = random_round(200, gamma, 40)
    for verify, inputs in ((verify_sampled, arguments), (verify_greedy, (arguments[0], *arguments[2:4]))):
        compiled = torch.compile(verify, fullgraph=True, dynamic=False)
        assert outcome(compiled(*inputs)) == outcome(verify(*inputs))
