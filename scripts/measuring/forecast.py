"""Speculation by the cost model, before anyone waits for it or buys a chip, and measurements next to it.

Shapes: B rows, gamma tokens drafted per round; T_T a step of plain decoding, T_D a draft step, T_V a verification.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpt_fast_sd import DraftConfig, EngineConfig, loading, registry
from gpt_fast_sd.fast import triton_serves
from gpt_fast_sd.fast.devices import traits_of
from gpt_fast_sd.loading import TORCH_DTYPES, MemoryPlan, bytes_of_layers, bytes_of_weights, check_kv_dtype, locate
from gpt_fast_sd.loading.memory import MORE_NODES
from gpt_fast_sd.model import FORMATS, PRESETS, CacheFormat, ModelConfig, preset, read_config
from gpt_fast_sd.policies.config import further_tiers, gamma_tiers
from gpt_fast_sd.policies.standalone import check_draft_model
from gpt_fast_sd.quantization.quantize import TAIL
from gpt_fast_sd.quantization.table import precision, require_copy, require_sizes
from gpt_fast_sd.tp import local_config
from measuring import roofline
from measuring.chips import GIB, NETWORK_HOP, Chip, Link, Ranks, chip_named, chip_of, rates_here
from measuring.grid import Setting, draft_fields
from measuring.ledger import Record, complete, read_document
from measuring.replay import PROFILES
from measuring.roofline import EXPECTED, IDEAL, PRACTICAL, Conditions, Efficiency, Forecast, step_cost, step_seconds

Chances = Sequence[float]  # that the first, second, ... draft of a round is kept if those before it were
Alpha = float | Chances  # the same for all, or for each
ESTIMATES = {"roofline": IDEAL, "good": PRACTICAL, "expected": EXPECTED}


# Models that the engine does not run, by their config.json: what plan.py can say of them. Biases, gates, shared experts
# and the states of linear attention are left out, which are little.
_GPT_OSS = ModelConfig(
    vocab_size=201088, dim=2880, n_layers=24, n_heads=64, n_kv_heads=8, head_dim=64, ffn_dim=2880, max_seq_len=131072
)
OTHERS: dict[str, tuple[ModelConfig, Record]] = {
    "openai/gpt-oss-20b": (_GPT_OSS, {"full_layers": 12, "window": 128, "experts": (32, 4)}),
    "openai/gpt-oss-120b": (
        replace(_GPT_OSS, n_layers=36), {"full_layers": 18, "window": 128, "experts": (128, 4)},
    ),
    "google/gemma-3-27b-pt": (
        ModelConfig(
            vocab_size=262208, dim=5376, n_layers=62, n_heads=32, n_kv_heads=16, head_dim=128, ffn_dim=21504,
            max_seq_len=131072, tie_embeddings=True,
        ), {"full_layers": 10, "window": 1024},
    ),
    "Qwen/Qwen3-Next-80B-A3B": (
        ModelConfig(
            vocab_size=151936, dim=2048, n_layers=48, n_heads=16, n_kv_heads=2, head_dim=256, ffn_dim=512,
            max_seq_len=262144,
        ), {"full_layers": 12, "window": 0, "experts": (512, 10)},
    ),
}  # fmt: skip


def shape_of(model: str) -> ModelConfig:
    """The shape of a preset (no file is read), of "bundled", of "smollm2", of a folder or of a GGUF file."""
    if model in OTHERS:
        return OTHERS[model][0]
    if model in PRESETS or not (model in ("bundled", "smollm2") or Path(model).exists()):
        return preset(model)
    return read_config(locate(model))


def chip_for(
    device: str | None, dtype: torch.dtype, bandwidth: float | None, flops: float | None, memory: float | None
) -> tuple[Chip, str]:
    """The chip of a name, this machine's for "this" (measured), or one of given rates, which replace published ones."""
    units = {"bandwidth": (bandwidth, 1e9, "GB/s"), "peak": (flops, 1e12, "TFLOP/s"), "memory": (memory, GIB, "GiB")}
    for name, (value, _, unit) in units.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number of {unit}, got {value:g}")
    given: Record = {name: value * unit for name, (value, unit, _) in units.items() if value is not None}
    if device is None:
        return Chip(name="a device of given rates", **given), "cuda"
    if device != "this":
        chip = chip_named(device).working_in(dtype)
        named = f", {' and '.join(given)} as given" if given else ""
        return replace(chip, **given, name=f"{chip.name}{named}"), "cuda"
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(here) if here.type == "cuda" else f"this CPU, threads: {torch.get_num_threads()}"
    chip = rates_here(here, dtype).chip(f"{name}, as measured now", loading.free_memory(here) or math.inf)
    return replace(chip, **given), here.type


def ranks_for(chip: Chip, tp: int, per_node: int, link: float | None, network: float | None) -> Ranks | None:
    """n such chips, per_node in a machine; link and network in GB/s each way. None for one chip."""
    own = chip.link if link is None else replace(chip.link, name="a link", bandwidth=link * 1e9)
    other = None if network is None else Link(name="a network", bandwidth=network * 1e9, hop=NETWORK_HOP)
    return Ranks(n=tp, link=own, per_node=per_node, network=other) if tp > 1 else None


@dataclass(frozen=True, kw_only=True)
class System:
    """A model on chips of a kind, "cuda" or "cpu"; room: tokens that a row may grow by; ranks: None for one chip."""

    model: ModelConfig
    chip: Chip
    device: str = "cuda"
    dtype: str = "bf16"
    kv_dtype: str | None = None
    quantize: str | None = None
    draft_model: ModelConfig | None = None
    ranks: Ranks | None = None
    room: int = 512
    # of a target that the engine does not run, see roofline.Conditions
    full_layers: int | None = None
    window: int = 0
    experts: tuple[int, int] | None = None
    kv_link: float | None = None

    def __post_init__(self) -> None:
        if self.full_layers is not None and not 0 <= self.full_layers <= self.model.n_layers:
            raise ValueError(f"full layers must be from 0 to the model's {self.model.n_layers}, got {self.full_layers}")
        if self.window and self.full_layers is None:
            raise ValueError(f"a window of {self.window:,} is for models of which some layers attend to everything")
        if self.experts and not 1 <= self.experts[1] <= self.experts[0]:
            raise ValueError(
                f"experts are ALL/OWN, of which a token has at least 1 and at most all, got {self.experts}"
            )
        local_config(self.model, self.tp)  # refuses a model that ranks cannot share
        self.conditions()  # refuses weights that the chips do not run

    @property
    def tp(self) -> int:
        return self.ranks.n if self.ranks else 1

    @property
    def _format(self) -> CacheFormat:
        return FORMATS[self.kv_dtype or self.dtype]

    def draft_ranks(self, draft: DraftConfig) -> Ranks | None:
        n = draft.draft_tp or self.tp
        return replace(self.ranks, n=n) if self.ranks and n > 1 else None

    def conditions(self, efficiency: Efficiency = IDEAL, copy: str | None = None) -> Conditions:
        """Of every step of the target, or of its copy with weights of that precision, which drafts."""
        it = self._held(self.model, self.ranks, efficiency, copy or self.quantize, of_draft=copy is not None)
        return replace(it, full_layers=self.full_layers, window=self.window, experts=self.experts, kv_link=self.kv_link)

    def _held(
        self, model: ModelConfig, ranks: Ranks | None, efficiency: Efficiency, quantize: str | None, *,
        of_draft: bool = False,
    ) -> Conditions:  # fmt: skip
        """Of every step of a model that these ranks hold, the head quantized only of a draft.

        ValueError where the chips do not run weights of that precision, or not of these sizes.
        """
        own, device, n = float(TORCH_DTYPES[self.dtype].itemsize), torch.device(self.device), ranks.n if ranks else 1
        found = Conditions(
            weight_bytes=own, head_bytes=own, kv_bytes=self._format.element_bytes(model.head_dim), ranks=ranks,
            more_kernels=MORE_NODES.get(self._format.name, 0),
            precision="int8" if quantize == "planes" and not self.chip.float8 else quantize,  # by the same kernel
            efficiency=efficiency if self.device == "cuda" else replace(efficiency, narrow={}, most_tiled=math.inf),
        )  # fmt: skip
        if quantize is None:
            return found
        entry, shape = precision(quantize, device, of_draft=of_draft), local_config(model, n)
        if entry.capability and not self.chip.float8:
            raise ValueError(f"quantize {quantize!r} needs a GPU that multiplies float8, and {self.chip.name} does not")
        if entry.only_bf16 and self.dtype != "bf16":
            raise ValueError(f"quantize {quantize!r} needs bf16 weights, not {self.dtype}: use dtype 'bf16'")
        require_sizes(quantize, device, shape, n, of_draft=of_draft)
        weight = bytes_of_layers(shape, n, entry.bytes_of) / bytes_of_layers(shape, n, lambda o, i: o * i)
        if of_draft and not (entry.shares and model.tie_embeddings):  # such a head stays what it is
            rows = -(-model.vocab_size // n)
            own = precision(entry.head, device).bytes_of(rows, model.dim) / (rows * model.dim)
        return replace(found, weight_bytes=weight, head_bytes=own)

    def config(self, batch: int, context: int) -> EngineConfig:
        """The configuration of an engine for such rows; ValueError if it would refuse them."""
        config = EngineConfig(
            batch_size=batch, max_seq_len=context + self.room, device=self.device, dtype=self.dtype,
            kv_dtype=self.kv_dtype, quantize=self.quantize,
        )  # fmt: skip
        loading.check_positions(config, self.model)
        check_kv_dtype(config, TORCH_DTYPES[self.dtype])
        return config

    def plain(self, batch: int, context: float, efficiency: Efficiency = IDEAL) -> float:
        return step_seconds(self.model, self.chip, batch, 1, context, self.conditions(efficiency))

    def forecast(
        self, draft: DraftConfig, chances: Alpha, batch: int, context: float, gamma: int,
        efficiency: Efficiency = IDEAL,
    ) -> Forecast:  # fmt: skip
        """Rounds of gamma drafts, including the cost of their selection; gamma 0 is plain decoding."""
        loading.check_planes(EngineConfig(kv_dtype=self.kv_dtype), draft, self.model)
        device, policy, n = torch.device(self.device), registry.policy_class(draft.policy), draft.quantize
        under = replace(self.conditions(efficiency), precision="both planes" if n == "planes" else self.quantize)
        theirs = self.draft_model and replace(self.draft_model)  # a copy, distinct even if it has the target's shape
        views = [registry.view_class(name) for name in policy.views(draft)]
        page = draft.page if gamma and any(view.wants_mass for view in views) else 0
        tokens, drafting, selecting = roofline.omega(gamma, chances), 0.0, 0.0
        for step in policy.model_steps(draft, self.model, theirs, gamma) if gamma else ():
            view = registry.view_class(step.view)
            size = step.model, self.chip, batch
            if step.model is theirs:
                of_step = self._held(theirs, self.draft_ranks(draft), efficiency, draft.quantize, of_draft=True)
            else:
                if draft.quantize:
                    require_copy(draft.quantize, self.quantize)
                of_step = self.conditions(efficiency, draft.quantize)
            head_dim, upper = step.model.head_dim, draft.needs_planes and step.model is not theirs
            if upper:
                of_step = replace(of_step, kv_bytes=self._format.element_bytes(head_dim, upper=True))
            reads = view.reads(draft, int(context))
            # bounds of a page, the largest and the smallest key, are an entry's numbers
            beside = view.bounds_read(draft, int(context)) * max(self._format.dtype.itemsize, 2)
            beside += min(reads, TAIL) * 0.5 if upper else 0.0  # the other plane of the tail
            reading = replace(of_step, beside=beside / of_step.kv_bytes)
            drafting += step.count * step_seconds(*size, step.n_tokens, reads, reading, attention=step.view)
            if (period := view.refresh_period(draft)) and context > draft.budget:
                # on CUDA keys are read twice, with their weights and to sum these, and values once
                selecting += roofline.refresh_seconds(
                    *size, int(context), tokens, of_step, every=period, n_observed=view.n_observed,
                    reads=1.5 if triton_serves(device) else 1.0, at_once=traits_of(device).windows,
                )  # fmt: skip
        return Forecast(
            gamma=gamma, tokens=tokens, target_seconds=self.plain(batch, context, efficiency),
            draft_seconds=drafting / gamma if gamma else 0.0,
            verify_seconds=step_seconds(self.model, self.chip, batch, gamma + 1, context, under, mass_page=page),
            select_seconds=selecting + efficiency.judge_seconds if gamma else 0.0,
        )  # fmt: skip

    def predict(
        self, draft: DraftConfig, batch: int, context: float, chance: float, tokens: float,
        rounds_by_gamma: Mapping[int, int],
    ) -> Record:  # fmt: skip
        """A plain step, the average of rounds, and their gain at so many tokens per round and chance of a draft."""
        plain, n = self.plain(batch, context), sum(rounds_by_gamma.values())
        rounds = {gamma: self.forecast(draft, chance, batch, context, gamma) for gamma in rounds_by_gamma}
        a_round = sum(rounds_by_gamma[gamma] * one.round_seconds for gamma, one in rounds.items()) / n
        return {"plain_ms": plain * 1e3, "round_ms": a_round * 1e3, "speedup": tokens * plain / a_round}

    def best(self, draft: DraftConfig, chances: Alpha, batch: int, context: float, e: Efficiency = IDEAL) -> Forecast:
        """Rounds with the gamma that a configuration fixes, or with the best that gamma "auto" times beforehand."""
        group = self.model.group_size
        tiers = gamma_tiers(group)[1:] + further_tiers(group) if isinstance(draft.gamma, str) else (draft.gamma,)
        return roofline.best_gamma(lambda gamma: self.forecast(draft, chances, batch, context, gamma, e), tiers)

    def memory(self, draft: DraftConfig, batch: int, context: int) -> tuple[int, str | None]:
        """Bytes on each chip by an engine's memory plan, and None or, if they do not fit, advice on what would."""
        if self.full_layers is not None or self.experts or self.kv_link:
            return self._memory_of_others(batch, context)
        config, device = self.config(batch, context), torch.device(self.device)
        have = None if math.isinf(self.chip.memory) else int(self.chip.memory)
        size, on_cuda = TORCH_DTYPES[self.dtype].itemsize, self.device == "cuda"
        needed = self.draft_model if registry.policy_class(draft.policy).needs_model(draft) else None
        if needed:
            check_draft_model(needed, self.model, config.max_seq_len, draft)
        ranks = self.draft_ranks(draft)
        parts = [(self.model, self.tp)] + ([(needed, ranks.n if ranks else 1)] if needed else [])
        target, theirs = [*(local_config(*part) for part in parts), None][:2]
        assert target
        plan = MemoryPlan.of(loading.System(
            config=config, draft=draft, model=target, draft_model=theirs, dtype=TORCH_DTYPES[self.dtype], device=device,
            weights=sum(
                bytes_of_weights(model, n, size, self.quantize if model is self.model else None, device)
                for model, n in parts
            ), groups=int(self.tp > 1),
            whole=have or 0, ranks=self.tp, draft_ranks=parts[-1][1], packs=not on_cuda and self.dtype == "bf16",
        ))  # fmt: skip
        try:
            plan.check(have)
        except ValueError as error:
            return plan.total, str(error).rpartition("; ")[2]
        return plan.total, None

    def _memory_of_others(self, batch: int, context: int) -> tuple[int, str | None]:
        """Bytes of a model that no engine plans: weights of all experts, and the keys and values that it keeps."""
        under, model = self.conditions(), self.model
        everyone = step_cost(model, 10**9 if self.experts else 1, 1, 0, under).weight_bytes
        kept = 0.0 if self.kv_link else step_cost(model, batch, 1, context + self.room, under).kv_bytes
        total = int(everyone + kept)
        return total, None if total <= self.chip.memory else "by weights, keys and values alone; take fewer rows"

    def break_even(self, draft: DraftConfig, chances: Alpha, batch: int, e: Efficiency = IDEAL) -> int | None:
        """The shortest context at which drafting is faster than plain decoding; None: at none within the model's."""
        return self._first(lambda context: self.best(draft, chances, batch, context, e).ratio > 1)

    def critical(self, draft: DraftConfig, chances: Alpha, batches: list[int], e: Efficiency = IDEAL) -> int | None:
        """The shortest context at which the largest batch gains at least as much as the smallest; None: at none."""

        def grows(context: int) -> bool:
            few, many = (self.best(draft, chances, n, context, e).ratio for n in (min(batches), max(batches)))
            return many >= few

        return self._first(grows)

    def _first(self, holds: Callable[[int], bool]) -> int | None:
        """The shortest context at which something holds that, once it does, holds at every longer one."""
        low, high = 0, self.model.max_seq_len - self.room
        if high < 1 or not holds(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high


def budget_of(draft: DraftConfig) -> int | None:
    return draft.budget if "budget" in registry.fields_used(draft.policy) else None


def label(one: Record) -> str:
    return Setting(policy=one["policy"], budget=one["budget"]).label


@dataclass(frozen=True, kw_only=True)
class Kept:
    """How many drafts are kept: as given, by policy ("" is any), as measured, or else as published."""

    said: Mapping[str, float]
    measured: Sequence[Record] = ()

    @staticmethod
    def of(texts: Sequence[str]) -> Kept:
        """From 0.8, streaming=0.8 and results of an earlier run (JSON); ValueError if a text is none of these."""
        said: dict[str, float] = {}
        measured: list[Record] = []
        for text in texts:
            policy, _, rate = text.rpartition("=")
            if text.endswith(".json"):
                measured += _measured_acceptance(Path(text))
                continue
            try:
                said[policy] = float(rate)
            except ValueError:
                said[policy] = math.nan
            if not 0.0 <= said[policy] <= 1.0 or policy not in ("", *registry.policies()):
                raise ValueError(
                    f"acceptance must be a rate from 0 to 1, POLICY=rate or a .json file of results, got {text!r:.80}"
                )
        return Kept(said=said, measured=measured)

    def chances(self, draft: DraftConfig, context: int) -> tuple[Chances, str]:
        """The chances of a draft, and their source; ValueError if there are none."""
        policy, budget = draft.policy, budget_of(draft)
        if (rate := self.said.get(policy, self.said.get(""))) is not None:
            return (rate,), "given"
        ours = [one for one in self.measured if (one["policy"], one["budget"]) == (policy, budget)]
        if ours:
            one = min(ours, key=lambda one: (abs(one["context"] - context), one["temperature"]))
            return one["chances"], f"measured: {one['file']}, context {one['context']:,}, T {one['temperature']:g}"
        if self.measured:
            there = ", ".join(sorted({label(one) for one in self.measured}))
            who = label({"policy": policy, "budget": budget})
            raise ValueError(f"no acceptance of {who} was measured there, only of {there}")
        if policy in PROFILES:
            profile = PROFILES[policy].with_weights(draft.quantize)
            return profile.chances, f"assumed: {profile.source}"
        raise ValueError(f"no published acceptance of {policy} is known: give one, as in {policy}=0.5")


def _measured_acceptance(path: Path) -> list[Record]:
    """Acceptance in the results of a frontier or a sweep, for drafts that follow accepted ones.

    From the shares of positions i and i - 1, which is exact if every round drafted equally many: gamma "auto" drafts
    more where that pays, so there it is a guess.
    """
    document, found = read_document(path, "frontier", "batch"), []
    with complete(path):
        for one in document.get("results") or document.get("points") or ():
            shares = one.get("acceptance_by_position")
            if shares:
                settings = {"temperature": 0.0} | document["settings"] | one
                chances = [min(1.0, b / a) if a else 0.0 for a, b in zip([1.0, *shares], shares, strict=False)]
                keys = ("policy", "budget", "context", "temperature")
                found.append({key: settings[key] for key in keys} | {"chances": chances, "file": path.name})
    if not found:
        raise ValueError(f"{path} holds no acceptance by position")
    return found


def default_policies(system: System) -> list[str]:
    """The policies for which an acceptance was published, including those of a draft model if there is one."""
    needs = {name for name in registry.policies() if registry.policy_class(name).own_cache}
    return [name for name in registry.policies() if name in PROFILES and (system.draft_model or name not in needs)]


def cell(system: System, draft: DraftConfig, kept: Kept, batch: int, context: int, efficiency: Efficiency) -> Record:
    """One draft in one batch and context, JSON-ready; times in milliseconds."""
    chances, source = kept.chances(draft, context)
    n_bytes, advice = system.memory(draft, batch, context)  # refuses before anything is computed
    one, ideal = (system.best(draft, chances, batch, context, e) for e in (efficiency, IDEAL))
    return {
        "batch": batch, "context": context, "policy": draft.policy, "budget": budget_of(draft),
        "acceptance": list(chances), "acceptance_source": source, "gamma": one.gamma, "tokens_per_round": one.tokens,
        "plain_ms": one.target_seconds * 1e3, "draft_ms": one.draft_seconds * 1e3,
        "verify_ms": one.verify_seconds * 1e3, "select_ms": one.select_seconds * 1e3,
        "round_ms": one.round_seconds * 1e3, "speedup": one.ratio, "speedup_of_roofline": ideal.ratio,
        "collective_ms": roofline.collective_seconds(system.model, batch, system.conditions()) * 1e3,
        "plain_tokens_per_second": batch / one.target_seconds,
        "speculative_tokens_per_second": batch * one.tokens / one.round_seconds,
        "memory_bytes": n_bytes, "fits": advice is None, "advice": advice,
    }  # fmt: skip


def compare(path: Path) -> list[Record]:
    """The measurements of a sweep next to the prediction from that machine's own rates, at the same acceptance."""
    document = read_document(path, "batch")
    with complete(path):
        measured = [point for point in document.get("points", ()) if point.get("status") == "measured"]
        found = [_beside(document["settings"], point) for point in measured]
    if not found:
        raise ValueError(f"{path} holds no measured points of a sweep")
    return found


def _beside(settings: Record, point: Record) -> Record:
    """One measured point of a sweep with these settings, and what is predicted for it."""
    machine, tp = settings["machine"], settings.get("tp", 1)
    chip = Chip(name=machine["cpu"], **point["machine"])
    chip = replace(chip, link=(chip_of(machine["device"]) or chip).link)
    # position scaling costs nothing and is left out
    shapes = [settings[key] and ModelConfig(**{**settings[key], "rope_scaling": None, "eos_ids": ()})
              for key in ("transformer", "draft_transformer")]  # fmt: skip
    system = System(
        model=shapes[0], draft_model=shapes[1], chip=chip, device=settings["device"], dtype=point["dtype"],
        kv_dtype=point["kv_dtype"], quantize=settings["quantize"], ranks=ranks_for(chip, tp, tp, None, None),
    )  # fmt: skip
    draft = Setting(policy=point["policy"], budget=point["budget"]).draft("auto", draft_fields(settings))
    predicted = system.predict(
        draft, point["batch"], point["context"] + settings["max_new_tokens"] / 2, point["acceptance_rate"],
        point["speculative"]["tokens_per_round"], {int(gamma): n for gamma, n in point["rounds_by_gamma"].items()},
    )  # fmt: skip
    return {
        **{key: point[key] for key in ("batch", "context", "policy", "budget", "gamma", "temperature")}, **predicted,
        "plain_ms_measured": point["plain"]["round_ms"]["round"],
        "round_ms_measured": point["speculative"]["round_ms"]["round"],
        "speedup_measured": (point["speedup"]["steady"] or point["speedup"]["completion"])["median"],
    }  # fmt: skip
