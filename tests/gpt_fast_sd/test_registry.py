"""A policy is one file and one line: configuration, memory, programs, README and tests all read the registry."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, SamplingParams, registry
from gpt_fast_sd.policies import Draft, DraftPolicy, View
from gpt_fast_sd.serving import launch
from gpt_fast_sd.state import BatchState, RoundPlan
from gpt_fast_sd.steps import Runner
from gpt_fast_sd.tp import Group
from measuring import grid
from scripts import generate
from tests.drafts import PLANES, POLICIES, VIEWS
from tests.gpt_fast_sd.test_rounds import GREEDY, PROMPTS, captured, engine
from tests.gpt_fast_sd.test_speculation import speculation_changes_nothing
from tests.helpers import tiny_config, tiny_engine

ROOT = Path(__file__).resolve().parents[2]


class Toy(DraftPolicy):
    """The pending token again and again."""

    about = "a toy"
    flags = ("ngram",)
    proposers = ("toy",)

    @classmethod
    def build(cls, config: DraftConfig, target: Runner, draft_model: Any, draft_group: Group) -> DraftPolicy:
        return cls()

    def propose(self, state: BatchState, plan: RoundPlan) -> Draft:
        return Draft(state.pending[:, None].repeat(1, plan.gamma), None, torch.full_like(state.pending, plan.gamma))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(registry, "DRAFTERS", dict(registry.DRAFTERS))
    registry.register("toy", Toy)
    yield "toy"


def test_a_name_is_registered_once(toy: str) -> None:
    assert registry.policies()[-1] == toy
    for name in (toy, "streaming", "off"):
        with pytest.raises(ValueError, match=f"there is already a policy '{name}'"):
            registry.register(name, Toy)


@pytest.mark.parametrize(
    ("name", "made", "said"),
    [("", Toy, "one word"), (3, Toy, "one word"), ("a b", Toy, "one word"), ("mine", object, "class of View"),
     ("mine", Toy(), "class of View"), ("mine", "lookup.LookupDraft", "class of View"),
     ("mine", DraftPolicy, "class of View"), ("mine", View, "class of View")],
)  # fmt: skip
def test_what_is_not_a_policy_is_not_registered(name: Any, made: Any, said: str) -> None:
    before = registry.policies()
    with pytest.raises(ValueError, match=said):
        registry.register(name, made)
    assert registry.policies() == before


def test_a_registered_policy_without_a_budget_is_measured_once(toy: str) -> None:
    assert [setting.label for setting in grid.settings_of([toy, "streaming"], [64, 128])] == [
        toy, "streaming 64", "streaming 128",
    ]  # fmt: skip
    assert not grid.has_a_model(toy) and toy in grid.known_drafters()


def test_a_registered_policy_drafts_without_a_change_of_what_is_said(toy: str) -> None:
    for gamma in (1, 4):
        assert speculation_changes_nothing(toy, gamma, 2)
    eager, later, plain = (one.generate(PROMPTS, GREEDY) for one in (engine(toy), captured(toy), engine("off")))
    assert [c.tokens for c in eager] == [c.tokens for c in later] == [c.tokens for c in plain]
    assert sum(sum(c.stats.drafted_by_position) for c in eager) > 0
    one = engine("lookup")  # as a program goes from one to another
    for name in (toy, "streaming", "off"):
        one.redraft(replace(engine(name).draft, gamma=3))
        assert {who for event in one.stream(PROMPTS, GREEDY) for who in event.sources} <= {name, "target"}
        assert [c.tokens for c in one.generate(PROMPTS, GREEDY)] == [c.tokens for c in plain]


def changed(**how: Any) -> Any:
    """Sampled drafts of three tokens with a uniform q, but for what is given: functions of what it was."""

    def propose(self: Toy, state: BatchState, plan: RoundPlan) -> Draft:
        n, own = plan.gamma, TINY_VOCABULARY
        whole = {"tokens": state.pending[:, None].repeat(1, n), "q": torch.full((2, n, own), 1 / own),
                 "count": torch.full_like(state.pending, n)}  # fmt: skip
        return Draft(**{name: how.get(name, lambda x: x)(x) for name, x in whole.items()})

    return propose


TINY_VOCABULARY = tiny_config().vocab_size
BROKEN = [  # what a policy makes of tokens, q and count, and what is said of it
    ({"tokens": lambda x: x.repeat(1, 2)}, r"tokens of shape \[2, 6\] .*, not int64 \[2, at most 3\]"),
    ({"tokens": lambda x: x.int()}, r"tokens of shape \[2, 3\] and torch.int32"),
    ({"tokens": lambda x: x - 10**6}, r"token -\d+, where the model has \d+"),
    ({"tokens": lambda x: x + TINY_VOCABULARY}, "token .*, where the model has"),
    ({"count": lambda x: x + 96}, r"counts \[99, 99\], not int64 from 0 to 3"),
    ({"count": lambda x: x - 4}, r"counts \[-1, -1\]"),
    ({"count": lambda x: x[:1]}, r"counts \[3\], .* for each of 2 rows"),
    ({"q": lambda x: x.half()}, "q of shape .* and torch.float16, not fp32"),
    ({"q": lambda x: x[:, :2]}, r"q of shape \[2, 2,"),
    ({"q": lambda x: 2 * x}, "a q that sums to 2, not to 1"),
    ({"q": lambda x: torch.eye(x.shape[-1])[-1].expand(x.shape)}, "a token whose own q is 0"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "said"), BROKEN)
def test_what_no_policy_may_propose_is_refused_and_the_engine_goes_on(
    toy: str, how: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toy, "propose", changed(**how))
    one, prompts = tiny_engine(DraftConfig(policy=toy, gamma=3)), [[5, 6, 7], [8, 9]]
    sampled = SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^draft policy Toy proposed {said}"):
            one.generate(prompts, sampled)
    one.redraft(DraftConfig(policy="off"))
    assert [len(c.tokens) for c in one.generate(prompts, sampled)] == [6, 6]


def test_a_sound_draft_is_looked_at_once_of_each_kind(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, looked = tiny_engine(DraftConfig(policy=toy, gamma=3)), list[int]()
    monkeypatch.setattr(Toy, "propose", changed(q=lambda x: None))
    monkeypatch.setattr(launch, "wrong_with", lambda *given: (looked.append(int(given[3].sum())), "")[1])
    for _ in range(2):
        one.generate([[5, 6, 7]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert looked == [0, 1] and one.stats.rounds > 1  # over empty slots, and over a request


def test_a_registered_policy_is_a_flag(toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.json"
    generate.main(
        ["--model", "bundled", "--prompt", "Once", "--draft", toy, "--gamma", "2", "--max-new-tokens", "12",
         "--device", "cpu", "--no-compile", "--no-compare", "--json", str(out)]
    )  # fmt: skip
    run = json.loads(out.read_text(encoding="utf-8"))
    assert run["config"]["draft"]["policy"] == toy and len(run["completions"][0]["tokens"]) == 12
    with pytest.raises(SystemExit):
        generate.parse(["--help"])
    assert f"{toy:<13}a toy\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", registry.policies())
def test_every_policy_has_a_row_in_readme_that_says_what_its_class_says(name: str) -> None:
    table = re.search(r"\| `--draft` \|.*?\n\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert table
    rows = {cells[1].strip("` "): cells[2:4] for line in table[0].splitlines() if len(cells := line.split("|")) == 5}
    assert tuple(cell.strip() for cell in rows[name]) == registry.about(name)


def test_every_policy_and_view_is_in_the_tables_of_the_tests() -> None:
    drafting = set(registry.policies()) - {"off", "auto"}
    assert {row.get("policy", name) for name, row in (POLICIES | PLANES).items()} == drafting
    assert set(VIEWS) == set(registry.VIEWS) <= set(POLICIES)


@pytest.mark.parametrize("name", [name for name in registry.policies() if name != "off"])
def test_what_a_policy_uses_are_fields_of_its_configuration(name: str) -> None:
    classes: list[Any] = [registry.policy_class(name)] + [registry.view_class(n) for n in registry.VIEWS if n == name]
    fields = set(DraftConfig.__dataclass_fields__)
    assert {flag for one in classes for flag in one.flags} <= fields - {"policy", "gamma"}
