"""Acceptance replay: tables that follow their profiles, and results that keep what the table says."""

import itertools

import pytest
import torch

from gpt_fast_sd import DraftConfig, SamplingParams
from gpt_fast_sd.acceptance import AcceptResult
from gpt_fast_sd.fast.compile import own_code
from gpt_fast_sd.policies import Draft
from gpt_fast_sd.round import accept_step
from gpt_fast_sd.sampling import GREEDY
from measuring.replay import PROFILES, ROW_STD, Replay, replay_table
from tests.helpers import random_ids, tiny_engine

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PROFILES)
def test_a_table_keeps_as_many_drafts_as_its_profile_expects_and_is_its_seeds(name: str) -> None:
    profile = PROFILES[name]
    table = replay_table(profile, 500, 400, 6, seed=3, device=CPU)
    assert table.dtype == torch.int64
    assert 0 <= int(table.min()) < int(table.max()) == 6
    again, other = (replay_table(profile, 500, 400, 6, seed=seed, device=CPU) for seed in (3, 4))
    assert torch.equal(table, again) and not torch.equal(table, other)
    # 400 rows of spread ROW_STD: their mean is off by some hundredths of a token
    assert float(table.double().mean()) + 1 == pytest.approx(profile.tokens(6), abs=0.12)


def test_profiles_go_from_the_first_to_the_seventh_draft_and_stay_there() -> None:
    ends = {"low": (0.60, 0.46), "streaming": (0.80, 0.73), "snapkv": (0.91, 0.87), "guided": (0.968, 0.885)}
    for name, (first, last) in ends.items():
        chances = PROFILES[name].chances
        assert (chances[0], chances[6], len(chances)) == (first, pytest.approx(last), 7)
        assert all(a >= b for a, b in itertools.pairwise(chances))
        assert PROFILES[name].rows(torch.zeros(1), 10)[0, 7:].tolist() == pytest.approx([last] * 3)


def test_rows_differ_and_each_keeps_its_own_chance() -> None:
    table = replay_table(PROFILES["streaming"], 4000, 64, 1, seed=0, device=CPU).double()
    rates = table.mean(0)  # of each row
    assert float(rates.std()) == pytest.approx(ROW_STD, rel=0.3)
    halves = torch.corrcoef(torch.stack([table[:2000].mean(0), table[2000:].mean(0)]))
    assert float(halves[0, 1]) > 0.9


def test_a_replayed_verdict_keeps_what_the_table_says_row_after_row_and_wraps_round() -> None:
    replay = Replay(torch.tensor([[0, 3, 2], [2, 1, 0]]))
    drafted = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
    result = AcceptResult(torch.tensor([1, 1, 2]), torch.tensor([100, 200, 300]))
    max_accept = torch.full((3,), 3)
    first = replay.apply(result, drafted, max_accept)
    assert first.n_accepted.tolist() == [0, 3, 2]
    # row 0: the draft at place 0; row 1: all kept, so the target's; row 2: where the result stood, the target's
    assert first.next_token.tolist() == [10, 200, 300]
    second = replay.apply(result, drafted, max_accept)
    assert (second.n_accepted.tolist(), second.next_token.tolist()) == ([2, 1, 0], [12, 200, 30])
    assert replay.apply(result, drafted, max_accept).n_accepted.tolist() == [0, 3, 2]
    replay.rewind()
    assert replay.apply(result, drafted, max_accept).n_accepted.tolist() == [0, 3, 2]
    # it stays below the cap, and plain rounds do not move the table
    replay = Replay(torch.tensor([[3, 3], [1, 1]]))
    result = AcceptResult(torch.tensor([0, 0]), torch.tensor([8, 9]))
    assert replay.apply(result, torch.empty(2, 0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)) is result
    capped = replay.apply(result, torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([2, 0]))
    assert capped.n_accepted.tolist() == [2, 0]
    assert capped.next_token.tolist() == [3, 9]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_engine_that_replays_keeps_what_the_table_says_and_goes_on_as_ever_without(temperature: float) -> None:
    engine = tiny_engine(DraftConfig(policy="streaming", budget=16, gamma=3), max_seq_len=128)
    prompts = [random_ids(40, seed=1), random_ids(25, seed=2)]
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=5)
    before = [c.tokens for c in engine.generate(prompts, params)]
    table = torch.tensor([[0, 3], [2, 1], [3, 0], [1, 2]])
    engine.replay = Replay(table)
    accepted: list[list[int]] = [[], []]
    for event in engine.stream(prompts, params):
        accepted[event.index].append(event.accepted)
    for row, kept in enumerate(accepted):
        assert kept[:6] == table[[0, 1, 2, 3, 0, 1], row].tolist()
    engine.replay = None
    assert [c.tokens for c in engine.generate(prompts, params)] == before


def test_judging_with_a_replay_compiles_once_whichever_table_it_has() -> None:
    engine = tiny_engine(DraftConfig(policy="streaming", budget=16, gamma=3), max_seq_len=128)
    engine.state.remaining.fill_(100)
    engine.state.active.fill_(True)
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    step = torch.compile(own_code(accept_step), fullgraph=True, dynamic=False, backend=count)
    with torch.inference_mode():
        for seed in range(2):
            replay = Replay(replay_table(PROFILES["snapkv"], 4, 2, 3, seed, CPU))
            for row in range(3):
                draft = Draft(torch.randint(200, (2, 3)), None, torch.full((2,), 3))
                result = step(engine.state, GREEDY, torch.randn(2, 4, 258), draft, replay)  # [B, 2 * gamma + 5]
                assert result[:, 2].tolist() == replay.table[row].tolist()
    assert len(graphs) == 1
