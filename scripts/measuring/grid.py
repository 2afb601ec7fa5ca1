"""Which engine measures which points: policies and budgets over batches and contexts; a failure costs one point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any

from gpt_fast_sd.config import EngineConfig, SamplingParams
from gpt_fast_sd.engine import Engine
from gpt_fast_sd.policies.config import DraftConfig
from gpt_fast_sd.policies.registry import heeds, policies
from gpt_fast_sd.tp import Parallel
from measuring.machine import release_memory

OVER_STANDALONE = "hierarchy/standalone"  # a hierarchy whose cheap level is the draft model; "hierarchy" has lookup
# fields that policies refuse unless they use them
CHECKED = ("draft_model", "draft_tp", "view", "exit_layers", "quantize", "kv_bits")
Record = dict[str, Any]


# ---- who drafts ------------------------------------------------------------------------------------------------------


def known_drafters() -> tuple[str, ...]:
    """Everything that may draft, by name."""
    return (*(policy for policy in policies() if policy != "off"), OVER_STANDALONE)


def has_a_model(drafter: str) -> bool:
    """Whether it drafts with a model of its own."""
    policy, _, cheap = drafter.partition("/")
    fields = heeds(policy)
    return "draft_model" in fields and ("cheap" not in fields or cheap == "standalone")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A policy by its name in known_drafters, and its budget: None if it has none."""

    policy: str
    budget: int | None

    @property
    def label(self) -> str:
        """Policy and budget in one phrase."""
        return self.policy if self.budget is None else f"{self.policy} {self.budget:,}"

    @property
    def uses(self) -> set[str]:
        """The fields of DraftConfig that it uses."""
        fields = heeds(self.policy.partition("/")[0])
        return fields if has_a_model(self.policy) else fields - {"draft_model", "draft_tp"}

    def draft(self, gamma: int | str, common: Mapping[str, Any]) -> DraftConfig:
        """The configuration that it stands for; ValueError if that is invalid.

        common: other fields of DraftConfig; the policy takes those that it uses.
        """
        policy, _, cheap = self.policy.partition("/")
        changes = {name: value for name, value in common.items() if name in self.uses or name not in CHECKED}
        changes |= {} if self.budget is None else {"budget": self.budget}
        return DraftConfig(policy=policy, **{**changes, "gamma": gamma, **({"cheap": cheap} if cheap else {})})


def settings_of(policies: Sequence[str], budgets: Sequence[int]) -> list[Setting]:
    """Every policy with every budget, or once if it has none."""
    found = []
    for policy in policies:
        has_budget = "budget" in heeds(policy.partition("/")[0])
        found += [Setting(policy=policy, budget=budget) for budget in (budgets if has_budget else [None])]
    return found


def buildable(
    settings: Sequence[Setting], gammas: Sequence[int | str], common: Mapping[str, Any]
) -> tuple[list[Setting], dict[str, str]]:
    """The valid settings, and why the others are not, by label; ValueError if some budget has none left.

    Also for a field that was given and that none of them uses.
    """
    fine, skipped = [], {}
    for name in CHECKED:
        if common.get(name) is not None and not any(name in setting.uses for setting in settings):
            who = " and ".join(dict.fromkeys(setting.policy for setting in settings))
            raise ValueError(f"{name} does nothing for {who}: leave it out")
    for setting in settings:
        try:
            for gamma in gammas:
                setting.draft(gamma, common)
            fine.append(setting)
        except ValueError as error:
            skipped[setting.label] = str(error)
    for setting in settings:
        if all(other in fine or other.budget != setting.budget for other in settings):
            continue
        if not any(other.budget == setting.budget for other in fine):
            raise ValueError(skipped[setting.label])
    return fine, skipped


# ---- the file --------------------------------------------------------------------------------------------------------


def name_of(field: Field[Any]) -> str:
    """The name of a field in files and programs: two configurations have a field `quantize`."""
    return str(field.metadata.get("flag") or field.name)


COMMON: Record = {  # fields that all points of a file share, with their values for a file that does not name them
    name_of(f): f.default
    for config, names in (
        (EngineConfig, ("exact", "quantize", "kv_dtype", "cuda_graphs", "max_autotune")),
        (DraftConfig, ("view", "exit_layers", "ngram", "n_sink", "refresh", "page", "draft_tp", "quantize", "kv_bits")),
        (SamplingParams, ("top_k", "top_p", "min_p")),
    )
    for f in fields(config)
    if f.name in names
}


def in_common(given: Mapping[str, Any]) -> Record:
    """The requested fields that all results in one file must share."""
    return {name: given.get(name, default) for name, default in COMMON.items()}


def draft_fields(given: Mapping[str, Any]) -> Record:
    """The requested fields of DraftConfig that apply to every draft that uses them."""
    names = {name_of(f): f.name for f in fields(DraftConfig) if name_of(f) in {*COMMON, "draft_model"}}
    return {names[name]: value for name, value in given.items() if name in names}


def timed_on(environment: Record, device: str, tp: int) -> Record:
    """The properties of a machine that all times in one file must share. device: "cuda" or "cpu"."""
    where = {name: environment.get(name) for name in ("cpu", "device", "torch")}
    return {"machine": where, "device": device, "tp": tp, "threads": environment.get("threads")}


def up_to_date(document: Record) -> None:
    """Add the settings that a file of an earlier version did not name."""
    then = COMMON
    if document.get("benchmark") in ("batch", "frontier"):  # their files named the machine, but not as a setting
        here = document.get("environment", {})
        then = then | timed_on(here, "cpu" if here.get("device", "cpu") == "cpu" else "cuda", 1) | {"seconds": 0.0}
    document["settings"] = {**then, **document["settings"]}
    for record in document.get("points", ()):
        record.setdefault("temperature", document["settings"].get("temperature", 0.0))


# ---- the points ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement."""

    batch: int
    context: int
    setting: Setting
    gamma: int | str
    temperature: float = 0.0

    @property
    def key(self) -> Record:
        """The key under which its result is found again."""
        return {
            "batch": self.batch, "context": self.context, "policy": self.setting.policy,
            "budget": self.setting.budget, "gamma": self.gamma, "temperature": self.temperature,
        }  # fmt: skip

    @property
    def needs_model(self) -> bool:
        """Whether another model drafts, with which the engine must be built."""
        return has_a_model(self.setting.policy)


def draft_label(record: Record) -> str:
    """Who drafted, with which budget and gamma, and the temperature unless it is greedy."""
    who = f"{Setting(policy=record['policy'], budget=record['budget']).label}, gamma {record['gamma']}"
    return f"{who}, T {record['temperature']:g}" if record.get("temperature") else who


def groups(points: Sequence[Point], *, exact: bool) -> Iterator[list[Point]]:
    """Points that one engine measures, sized for their longest context: those of one batch.

    A draft model needs an engine of its own, and so does every context in exact mode, which always reads a whole slot.
    """

    def key(point: Point) -> tuple[object, ...]:
        whose = (point.setting, point.gamma) if point.needs_model else None
        return point.batch, whose, point.context if exact else None

    for one in dict.fromkeys(map(key, points)):
        yield [point for point in points if key(point) == one]


def recoverable_errors(parallel: Parallel) -> tuple[type[Exception], ...]:
    """Errors that cost one point; any other ends the run.

    With several processes, one alone may run out of memory, and the others would wait for it.
    """
    return (ValueError,) if parallel.dp * parallel.tp > 1 else (ValueError, RuntimeError, MemoryError)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """How points are measured: engines are shared, drafts are swapped, and a failure costs no other point.

    build: an engine for (batch, longest context, draft that it is built with, or None). draft: the draft of a point.
    measure: the result of a point. done: takes the result, or the error instead, as soon as it is there.
    """

    parallel: Parallel
    exact: bool
    build: Callable[[int, int, DraftConfig | None], Engine]
    draft: Callable[[Point], DraftConfig]
    measure: Callable[[Point, Engine], Record]
    done: Callable[[Point, Record | Exception], object]
    progress: Callable[[str], object] = lambda what: None

    def run(self, todo: Sequence[Point]) -> None:
        """Measure every point, or report why not."""
        for group in groups(todo, exact=self.exact):
            self._group(list(group))

    def _group(self, left: list[Point]) -> None:
        kinds = recoverable_errors(self.parallel)
        engine: Engine | None = None
        drafting: DraftConfig | None = None
        while left:
            point = left[0]
            draft = self.draft(point)
            self.progress(f"batch {point.batch}, {draft_label(point.key)}: loading and compiling")
            if engine is None or (draft.needs_planes and not engine.cache.format.planes):
                engine = None
                release_memory(self.parallel.device)
                longest = max(p.context for p in left)
                drafting = draft if point.needs_model or draft.needs_planes else None
                try:
                    engine = self.build(point.batch, longest, drafting)
                except kinds as error:
                    # it may be this draft for which none can be built: the others of its length get one without it
                    concerned = [p for p in left if drafting is None or self.draft(p) == draft]
                    longest = max(p.context for p in concerned)
                    failed = [p for p in concerned if p.context == longest]
                    self._failed(failed, error)
                    left = [p for p in left if p not in failed]
                    continue
            try:
                if drafting != draft:
                    engine.redraft(draft)
                    drafting = draft
                engine.warm_up()
            except kinds as error:
                self._failed([p for p in left if self.draft(p) == draft], error)
                left = [p for p in left if self.draft(p) != draft]
                engine = None
                continue
            left.pop(0)
            try:
                self.done(point, self.measure(point, engine))
            except kinds as error:
                self._failed([point], error)
                engine = None  # its state is unknown: the others get a new one

    def _failed(self, points: Sequence[Point], error: Exception) -> None:
        for point in points:
            self.done(point, error)
