"""Policies and budgets over batches and contexts: who drafts, the points, and which of them share an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any

from gpt_fast_sd import DraftConfig, EngineConfig, SamplingParams
from gpt_fast_sd.policies.registry import fields_used, policies

OVER_STANDALONE = "hierarchy/standalone"  # a hierarchy whose cheap level is the draft model; "hierarchy" has lookup
# fields that policies refuse unless they use them
CHECKED = ("draft_model", "draft_tp", "view", "exit_layers", "quantize", "kv_bits")
Record = dict[str, Any]


def known_drafters() -> tuple[str, ...]:
    return (*(policy for policy in policies() if policy != "off"), OVER_STANDALONE)


def has_a_model(drafter: str) -> bool:
    policy, _, cheap = drafter.partition("/")
    fields = fields_used(policy)
    return "draft_model" in fields and ("cheap" not in fields or cheap == "standalone")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A policy by its name in known_drafters, and its budget: None if it has none."""

    policy: str
    budget: int | None

    @property
    def label(self) -> str:
        return self.policy if self.budget is None else f"{self.policy} {self.budget:,}"

    @property
    def uses(self) -> set[str]:
        fields = fields_used(self.policy.partition("/")[0])
        return fields if has_a_model(self.policy) else fields - {"draft_model", "draft_tp"}

    def draft(self, gamma: int | str, common: Mapping[str, Any]) -> DraftConfig:
        """Its configuration, with those of the common fields that it uses; ValueError if that is invalid."""
        policy, _, cheap = self.policy.partition("/")
        changes = {name: value for name, value in common.items() if name in self.uses or name not in CHECKED}
        changes |= {} if self.budget is None else {"budget": self.budget}
        return DraftConfig(policy=policy, **{**changes, "gamma": gamma, **({"cheap": cheap} if cheap else {})})


def settings_of(policies: Sequence[str], budgets: Sequence[int]) -> list[Setting]:
    """Every policy with every budget, or once if it has none."""
    fields = {policy: fields_used(policy.partition("/")[0]) for policy in policies}
    return [Setting(policy=p, budget=n) for p in policies for n in (budgets if "budget" in fields[p] else [None])]


def buildable(
    settings: Sequence[Setting], gammas: Sequence[int | str], common: Mapping[str, Any]
) -> tuple[list[Setting], dict[str, str]]:
    """The valid settings, and why others are not; ValueError if a budget has none left, or nobody uses a field."""
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
        if not any(other.budget == setting.budget for other in fine):
            raise ValueError(skipped[setting.label])
    return fine, skipped


def name_of(field: Field[Any]) -> str:
    """The name of a field in files and programs: two configurations have a field `quantize`."""
    return str(field.metadata.get("flag") or field.name)


COMMON: Record = {  # fields that all points of a file share, and their defaults
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
        return {
            "batch": self.batch, "context": self.context, "policy": self.setting.policy,
            "budget": self.setting.budget, "gamma": self.gamma, "temperature": self.temperature,
        }  # fmt: skip

    @property
    def needs_model(self) -> bool:
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
