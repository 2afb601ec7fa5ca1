"""The card that generate.py ends with, its page and its JSON document.

The card says what was run and how fast, beside plain decoding if there is a comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparing import Comparison
from gpt_fast_sd import Completion, DraftConfig, Engine
from gpt_fast_sd.loading.fit import copies
from gpt_fast_sd.policies.auto import AutoDraft
from gpt_fast_sd.policies.registry import VIEWS
from gpt_fast_sd.quantization.table import bytes_held
from gpt_fast_sd.serving.draft_planner import DraftPlanner
from gpt_fast_sd.serving.stats import EngineStats
from measuring import Recorder, Way, page
from measuring.machine import environment
from records import as_record

OWN = ("ngram", "n_sink", "refresh", "page")  # settings of few policies, which the card shows if they were changed
Rows = list[tuple[str, str]]  # names and texts


def card(engine: Engine, prompts: Sequence[Sequence[int]], stats: EngineStats, comparison: Comparison | None) -> str:
    """What was run and how fast, next to plain decoding if there is a comparison."""
    rows = about(engine, prompts, stats, comparison)
    rows += side_by_side(comparison) if comparison else alone(engine, stats)
    if stats.drafted:
        shares = " ".join(f"{share:.0%}" for share in stats.acceptance_by_position)
        rows.append(("acceptance", f"{stats.acceptance_rate:.0%} of {stats.drafted:,} drafts; by position {shares}"))
    if engine.policy:
        by_gamma = sorted(stats.rounds_by_gamma.items(), reverse=True)
        rows.append(("rounds", ", ".join(f"{n:,} of gamma {gamma}" for gamma, n in by_gamma)))
    rows += found(engine, stats)
    if comparison:
        n = len(comparison.plain)
        rows += unquantized(comparison)
        rows += [("outputs", line) for line in verdict(engine, comparison)]
        rows.append(("measured", f"{n} runs each, in turns; the medians are shown" if n > 1 else "one run each"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}".rstrip() for name, text in rows)


def about(engine: Engine, prompts: Sequence[Sequence[int]], stats: EngineStats, comparison: Comparison | None) -> Rows:
    """What was run: names and texts."""
    config, lengths, parallel = engine.model.config, [len(ids) for ids in prompts], engine.parallel
    runs = comparison.plain + comparison.speculative if comparison else [stats]
    recompiles, capturing = sum(s.recompiles for s in runs), sum(s.capture_seconds for s in runs)
    weights = (
        f"{engine.config.quantize} weights in {engine.dtype_name}" if engine.config.quantize else engine.dtype_name
    )
    cache = f", KV cache {kv}" if (kv := engine.config.kv_dtype or engine.dtype_name) != engine.dtype_name else ""
    rows = [
        ("model", f"{config.n_params / 1e6:.1f} M parameters, {weights}{cache} on {engine.device.type}"
                  f"{'' if engine.compiled else ', not compiled'}{', exact' if engine.config.exact else ''}"),
        ("prompts", f"{len(prompts)} of {min(lengths):,} to {max(lengths):,} tokens, {engine.config.batch_size} slots"
                    if len(prompts) > 1 else f"{lengths[0]:,} tokens"),
        ("prefill", f"{stats.prefill_seconds:.2f} s, {stats.prefill_tokens_per_second:,.0f} tokens/s"),
        ("compiling", f"{stats.compile_seconds:.1f} s before the first token, {recompiles} recompiles since"),
    ]  # fmt: skip
    rows.append(("bodies", engine.target.bodies.about))
    if capturing:
        rows.append(("capturing", f"{capturing:.1f} s for CUDA graphs, not counted as decoding"))
    if parallel.dp * parallel.tp > 1:
        rows.insert(1, ("processes", f"{parallel.dp} replicas x {parallel.tp} that hold one together"))
    if engine.policy:
        rows.append(("draft", who_drafts(engine.draft)))
    return rows


def who_drafts(draft: DraftConfig) -> str:
    """The policy and the settings that concern it."""
    settings = {
        "of": draft.draft_model, "layers": draft.exit_layers,
        "cheap": draft.cheap if draft.policy == "hierarchy" else None,
        "view": draft.view_name if draft.policy not in (*VIEWS, "auto") else None,
        "budget": draft.budget if draft.view_name not in (None, "full") else None,
        "weights": draft.quantize, "kv bits": draft.kv_bits, "gamma": draft.gamma,
        **{name: getattr(draft, name) for name in OWN if getattr(draft, name) != getattr(DraftConfig, name)},
        "on processes": draft.draft_tp,
    }  # fmt: skip
    return ", ".join([draft.policy, *(f"{name} {value}" for name, value in settings.items() if value is not None)])


def found(engine: Engine, stats: EngineStats) -> Rows:
    """What "auto" has found out about those who may draft, in the last run that drafted.

    Why nothing pays is what it found last, and no account of a run most of whose rounds drafted.
    """
    planner = engine.schedule.planner
    if not (isinstance(planner, DraftPlanner) and isinstance(engine.policy, AutoDraft)):
        return []
    timed, others = ([one for one in planner.found() if (one.speed is None) == out] for out in (False, True))
    rows = []
    for one in timed:
        only_judged = one.judged and not one.rounds
        before = "judged" if only_judged else "tried before"
        when = "tried" if one.rounds else "not tried" if one.acceptance is None else before
        kept = "would be kept" if only_judged else "kept"
        kept = "by its steps alone" if one.acceptance is None else f"{one.acceptance:.0%} of first drafts {kept}"
        rows.append((when, f"{one.name}: {one.rounds:,} rounds, {one.speed:.2f} x of plain, {kept}"))
    arms = {arm.quantize for arm in engine.policy.arms} | {engine.config.quantize}
    if no_copies := {*copies(engine._plan.system)} - arms:
        asked, shared = engine.draft.quantize, engine.parallel.tp > 1
        why = f"{asked} was asked for" if asked else "ranks share the model" if shared else "no room here"
        rows.append(("no copies", f"{', '.join(sorted(no_copies))}: {why}"))
    if others:
        rows.append(
            ("left out", ", ".join(one.name for one in others) + ": could not pay here by what may be hoped of them")
        )
    plainly = stats.rounds_by_gamma.get(0, 0)
    if not (why := planner.why_not()) or 2 * plainly < sum(stats.rounds_by_gamma.values()):
        return rows
    fewer = "; fewer rows may gain: try --batch-size 1" if len(engine.schedule.slots) > 1 else ""
    return [*rows, ("nothing pays", why + fewer)]


def alone(engine: Engine, stats: EngineStats) -> Rows:
    """The speed of one run; for plain decoding, with the bytes that each step has to read."""
    rows = [
        ("decoding", f"{stats.decode_tokens:,} tokens at {stats.decode_tokens_per_second:,.1f} tokens/s"),
        ("KV read", f"{stats.kv_bytes_per_token / 1e6:.2f} MB per token"),
    ]
    if engine.policy:
        spent = ", ".join(f"{part} {share}" for part, share in time_split(stats).items())
        return [*rows, ("a round", f"{stats.tokens_per_round:.2f} tokens"), ("time", spent)]
    weights = bytes_held(engine.model)
    step, moved = over(stats.decode_seconds, stats.rounds), weights + over(stats.kv_bytes, stats.rounds)
    reading = f"{step * 1e3:.2f} ms for {moved / 1e6:.1f} MB of weights and keys, {over(moved, step) / 1e9:.1f} GB/s"
    return [*rows, ("a step", reading)]


def side_by_side(comparison: Comparison) -> Rows:
    """Both ways in two columns, and their ratio where it is meaningful."""
    ways = [way.stats for way in comparison.ways.values()]
    read, split = [stats.kv_bytes_per_token / 1e6 for stats in ways], [time_split(stats) for stats in ways]
    rows = [
        ("", "plain", "speculative", ""),
        ("tokens/s", *(f"{stats.decode_tokens_per_second:,.1f}" for stats in ways), f"{comparison.ratio:.2f} x"),
        ("KV MB per token", *(f"{mb:,.2f}" for mb in read), f"{over(read[1], read[0]):.2f} x"),
        ("tokens per round", *(f"{stats.tokens_per_round:.2f}" for stats in ways), ""),
        ("ms per round", *(f"{over(stats.decode_seconds, stats.rounds) * 1e3:.2f}" for stats in ways), ""),
        *((f"{part} time", *(shares[part] for shares in split), "") for part in split[0]),
    ]
    return [("", ""), *((name, f"{plain:>9}  {spec:>11}  {ratio}") for name, plain, spec, ratio in rows), ("", "")]


def unquantized(comparison: Comparison) -> Rows:
    """The speed over plain decoding with nothing quantized, which the ratio above is not; or why it is not known."""
    if comparison.unquantized is None:
        return []
    if isinstance(comparison.unquantized, str):
        return [("unquantized", f"not decoded: {comparison.unquantized}")]
    speed, ratio = Way.of(comparison.unquantized).speed, comparison.over_unquantized or 0.0
    text = (
        f"decoded plainly with nothing quantized, afterwards: {speed:,.1f} tokens/s; speculative {ratio:.2f} x of that"
    )
    return [("unquantized", text)]


def verdict(engine: Engine, comparison: Comparison) -> list[str]:
    """Whether both ways gave the same outputs, or whether rounding in the engine's dtypes explains the differences."""
    return comparison.verdict(engine.dtype_name, engine.config.kv_dtype or engine.dtype_name)


def report(
    engine: Engine, model: str, recorder: Recorder, prompts: list[list[int]], mine: list[int], n_requests: int,
    stats: EngineStats, comparison: Comparison | None,
) -> str:  # fmt: skip
    """The page of a run; mine: places of the recorded prompts among all n_requests; model: its name as given."""
    others = n_requests - len(mine)
    return page(
        recorder,
        f"{Path(model).name}, {f'{engine.draft.policy} drafts' if engine.policy else 'decoded plainly'}",
        ways=comparison.ways if comparison else {"speculative" if engine.policy else "plain": Way.of([stats])},
        facts=about(engine, prompts, stats, comparison) + found(engine, stats),
        names=mine,
        verdict=verdict(engine, comparison) if comparison else (),
        left_out=[f"Texts: those of other replicas ({others:,}), whose rounds are their own."] if others else (),
    )


def document(
    engine: Engine, model: str, completions: Sequence[Completion], stats: EngineStats, comparison: Comparison | None
) -> dict[str, Any]:
    """The JSON document of a run: completions and their cost; model: its name as given."""
    planner = engine.schedule.planner  # why_not: "" where something pays
    return {
        "completions": [as_record(completion) for completion in completions],
        "stats": stats.as_dict(),
        **({"plain": comparison.as_dict()} if comparison else {}),
        **(
            {"found": [vars(one) for one in planner.found()], "why_not": planner.why_not()}
            if isinstance(planner, DraftPlanner)
            else {}
        ),
        "config": {
            "model": model,
            "engine": dataclasses.asdict(engine.config),
            "draft": dataclasses.asdict(engine.draft),
            "transformer": dataclasses.asdict(engine.model.config),
        },
        "environment": environment(engine.device)
        | {"dp": engine.parallel.dp, "tp": engine.parallel.tp, "bodies": dict(engine.target.bodies.names)},
    }


def time_split(stats: EngineStats) -> dict[str, str]:
    """The shares of decoding time, in percent."""
    parts = {"draft": stats.draft_seconds, "verify": stats.verify_seconds}
    if stats.device_seconds:  # rounds were captured: nobody knows their parts
        parts = {"rounds on the device": stats.device_seconds}
    seconds = {**parts, "host": stats.host_seconds}
    return {part: f"{over(value, stats.decode_seconds):.0%}" for part, value in seconds.items()}


def over(a: float, b: float) -> float:
    return a / b if b else 0.0
