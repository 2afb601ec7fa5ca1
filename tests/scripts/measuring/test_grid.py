"""Who drafts, which points share an engine, and that what fails costs no other point."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.tp import Parallel
from measuring import grid
from measuring.grid import Point, Setting, buildable, groups, has_a_model, settings_of
from measuring.modes import Mode
from tests.helpers import ByteTokenizer, few, random_ids, tiny_model


def point(policy: str = "streaming", batch: int = 1, context: int = 100, gamma: int | str = 4) -> Point:
    return Point(batch=batch, context=context, setting=Setting(policy=policy, budget=64), gamma=gamma)


def test_the_name_of_a_hierarchy_says_who_is_its_cheap_level() -> None:
    common = {"draft_model": "bundled", "view": "quest", "page": 32}
    over = Setting(policy="hierarchy/standalone", budget=128).draft(4, common)
    assert (over.policy, over.cheap, over.draft_model, over.gamma) == ("hierarchy", "standalone", "bundled", 4)
    under = Setting(policy="hierarchy", budget=128).draft(4, common)
    assert under.draft_model is None and (under.view, under.page) == ("quest", 32)
    assert has_a_model("hierarchy/standalone") and not has_a_model("hierarchy")


@pytest.mark.parametrize("policy", grid.known_drafters())
def test_every_drafter_takes_those_of_the_common_fields_that_it_uses(policy: str) -> None:
    given = {"draft_model": "bundled", "exit_layers": 1, "view": None, "ngram": 5, "n_sink": 8, "page": 32, "gamma": 9}
    budget = None if policy in ("lookup", "full") else 256
    draft = Setting(policy=policy, budget=budget).draft("auto", grid.draft_fields(given))
    assert (draft.ngram, draft.n_sink, draft.page, draft.gamma) == (5, 8, 32, "auto")
    assert draft.exit_layers == (1 if policy == "early_exit" else None)
    assert (draft.draft_model is not None) == has_a_model(policy)


def test_a_field_that_no_policy_of_a_measurement_uses_is_refused() -> None:
    settings = settings_of(["streaming", "early_exit"], [64])
    assert len(buildable(settings, [4], {"exit_layers": 1, "view": "quest"})[0]) == 2
    with pytest.raises(ValueError, match="exit_layers does nothing for streaming: leave it out"):
        buildable(settings[:1], [4], {"exit_layers": 1})
    with pytest.raises(ValueError, match="draft_model does nothing for streaming and hierarchy"):
        buildable(settings_of(["streaming", "hierarchy"], [64]), [4], {"draft_model": "bundled"})


OFTEN = ["quest", "lookup", "standalone"]


@pytest.mark.parametrize("policy", few([*OFTEN, "streaming", "snapkv", "guided", "early_exit"], OFTEN))
def test_an_engine_that_changes_its_draft_is_the_engine_that_was_built_with_it(policy: str) -> None:
    """Otherwise a sweep would not be what a user gets; the prompts are prefilled once for all of it."""
    model, small = tiny_model(), tiny_model(seed=1)
    config = EngineConfig(batch_size=2, max_seq_len=400, dtype="fp32", compile=False)
    prompts, params = [random_ids(300), random_ids(120, seed=1)], SamplingParams(max_tokens=24)
    changing = Engine(model, ByteTokenizer(), config)
    plain = [c.tokens for c in changing.generate(prompts, params)]
    for other in ("guided", policy):
        draft = Setting(policy=other, budget=None if other == "lookup" else 64).draft(3, {"draft_model": "a folder"})
        changing.redraft(draft, small if draft.draft_model else None)
        changed = changing.generate(prompts, params)
    assert changing.stats.prefill_tokens == 0
    built = Engine(model, ByteTokenizer(), config, draft, small if policy == "standalone" else None)
    fresh = built.generate(prompts, params)
    assert [c.tokens for c in changed] == [c.tokens for c in fresh] == plain
    assert [c.stats for c in changed] == [c.stats for c in fresh]
    assert changing.stats.kv_bytes == built.stats.kv_bytes


def test_a_batch_shares_an_engine_but_for_draft_models_and_exact_mode() -> None:
    kinds = itertools.product((1, 2), ("streaming", "standalone"), (4, 6), (100, 200))
    points = [point(policy, batch, context, gamma) for batch, policy, gamma, context in kinds]
    shared = [*groups(points, exact=False)]
    assert [len(group) for group in shared] == [4, 2, 2, 4, 2, 2]
    assert [point for group in shared for point in group] == points
    assert [len(group) for group in groups(points, exact=True)] == [2, 2, 1, 1, 1, 1] * 2


class Engines(Mode):
    """A measurement whose engines only say what is done with them."""

    def __init__(self, *, too_long: int = 10**6, odd: str = "", broken: int = 0) -> None:
        self.too_long, self.odd, self.broken, self.said = too_long, odd, broken, list[str]()
        args, parallel = SimpleNamespace(exact=False), Parallel(torch.device("cpu"))
        self.job: Any = SimpleNamespace(args=args, parallel=parallel, draft=self.draft)
        self.bar = SimpleNamespace(update=lambda: None, set_description=lambda what: None)

    def draft(self, point: Point) -> DraftConfig:
        return point.setting.draft(point.gamma, {"draft_model": "bundled"})

    def build(self, batch: int, context: int, draft: DraftConfig | None) -> Any:
        if context > self.too_long:
            raise ValueError(f"{context} is too long")
        if draft and draft.policy == self.odd:
            raise ValueError("it does not fit")
        self.said.append(f"build {batch} x {context}{f' for {draft.policy}' if draft else ''}")
        return self

    def redraft(self, draft: DraftConfig) -> None:
        if draft.policy == self.odd:
            raise ValueError("it does not fit")
        self.said.append(draft.policy)

    def warm_up(self) -> None:
        pass

    def measure(self, point: Point, engine: Any) -> dict[str, Any]:
        if point.context == self.broken:
            raise torch.OutOfMemoryError("no memory is left")
        return {"context": point.context}

    def done(self, point: Point, found: dict[str, Any] | Exception) -> None:
        self.said.append(type(found).__name__ if isinstance(found, Exception) else f"done {point.context}")


ORDERS: dict[str, tuple[dict[str, Any], list[Point], list[str]]] = {
    "one engine is built for a batch, and drafts are exchanged": (
        {}, [point(policy, context=n) for policy in ("streaming", "lookup", "standalone") for n in (50, 90)],
        ["build 1 x 90", "streaming", "done 50", "done 90", "lookup", "done 50", "done 90",
         "build 1 x 90 for standalone", "done 50", "done 90"],
    ),
    "what is too long leaves an engine for the others": (
        {"too_long": 60}, [point(context=50), point(context=90), point(context=60)],
        ["ValueError", "build 1 x 60", "streaming", "done 50", "done 60"],
    ),
    "a policy that does not fit is skipped and the others go on": (
        {"odd": "quest"}, [point("quest"), point("quest", context=60), point("lookup")],
        ["build 1 x 100", "ValueError", "ValueError", "build 1 x 100", "lookup", "done 100"],
    ),
    "a policy for which no engine can be built is skipped and the others go on": (  # once all of its length were
        {"odd": "quantized"},
        [point("quantized", context=50), point("quantized"), point("lookup"), point("streaming", context=50)],
        ["ValueError", "ValueError", "build 1 x 100", "lookup", "done 100", "streaming", "done 50"],
    ),
    "what fails while it is measured gets the others a new engine": (
        {"broken": 60}, [point(context=50), point(context=60), point(context=70)],
        ["build 1 x 70", "streaming", "done 50", "OutOfMemoryError", "build 1 x 70", "streaming", "done 70"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("engines", "points", "said"), ORDERS.values(), ids=ORDERS)
def test_points_share_engines_and_a_failure_costs_no_other(engines: Any, points: list[Point], said: list[str]) -> None:
    one = Engines(**engines)
    for group in groups(points, exact=False):
        one.measure_group(group)
    assert one.said == said
