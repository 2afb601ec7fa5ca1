"""The same prompts decoded plainly and speculatively by one engine: how fast each was, and whether outputs agree."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpt_fast_sd import Completion, DraftConfig, Engine, SamplingParams
from gpt_fast_sd.config import QUANTIZED_CACHES
from gpt_fast_sd.serving.stats import EngineStats
from measuring.lossless import NEAR_TIE, Difference, differences
from measuring.report import Way

RUNS, SHORT_RUN = 3, 20.0  # runs of each kind in a comparison, if a run takes fewer seconds than this


@dataclass(frozen=True)
class Comparison:
    """The same prompts decoded both ways; the run of median speed represents each kind."""

    plain: list[EngineStats]
    speculative: list[EngineStats]
    n_greedy: int  # outputs that can be compared: samples differ by design
    differences: list[Difference]
    unquantized: list[EngineStats] | str | None = None  # see plainly_unquantized; None: nothing is quantized

    @property
    def ways(self) -> dict[str, Way]:
        return {"plain": Way.of(self.plain), "speculative": Way.of(self.speculative)}

    @property
    def ratio(self) -> float:
        plain, speculative = (way.speed for way in self.ways.values())
        return speculative / plain if plain else 0.0

    @property
    def over_unquantized(self) -> float | None:
        """Speculative tokens/s over those of plain decoding with nothing quantized; None if that was not measured."""
        if not isinstance(self.unquantized, list):
            return None
        base = Way.of(self.unquantized).speed
        return self.ways["speculative"].speed / base if base else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; outputs_equal is null if all outputs were sampled."""
        plain, speculative = self.ways.values()
        return {
            "stats": plain.stats.as_dict(), "ratio": self.ratio, "outputs_compared": self.n_greedy,
            "outputs_equal": not self.differences if self.n_greedy else None,
            "differences": [asdict(difference) for difference in self.differences],
            "plain_tokens_per_second": plain.speeds, "speculative_tokens_per_second": speculative.speeds,
            "unquantized": self.unquantized if isinstance(self.unquantized, str | None) else {
                "stats": Way.of(self.unquantized).stats.as_dict(), "ratio": self.over_unquantized,
                "tokens_per_second": Way.of(self.unquantized).speeds,
            },
        }  # fmt: skip

    def verdict(self, *dtypes: str) -> list[str]:
        """Whether both ways gave the same outputs; if not, whether rounding in one of these dtypes explains it."""
        n_greedy, found = self.n_greedy, self.differences
        if not n_greedy:
            return ["not compared: they were sampled, and samples differ by design"]
        if not found:
            return ["equal, token for token" if n_greedy == 1 else f"all {n_greedy} greedy ones equal, token for token"]
        dtype = max(dtypes, key=NEAR_TIE.__getitem__)  # the coarser one
        lines = [f"{n_greedy - len(found)} of {n_greedy} greedy ones equal, token for token"]
        for one in found:
            line = f"prompt {one.index} differs from output token {one.position} on"
            if one.is_near_tie(dtype):
                line += f": a near-tie, the two best logits are {one.gap:.2g} apart, which {dtype} rounds away"
            else:
                line += f": the logits are {one.gap:.2g} apart, more than {dtype} rounds away; please report it"
            lines.append(line)
        return lines


def compare(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], shown: Sequence[Completion],
    model: str,
) -> Comparison:  # fmt: skip
    """Decode the prompts of `shown` plainly as well; if that is quick, continue in turns up to RUNS of each kind.

    Later runs find the first one's keys in their slots; its prefill is in the stats of all. model: the engine's, by its
    name as given: where the target is quantized, it is decoded plainly without that, too.
    """
    first = engine.stats
    plain, speculative = [], [first]
    began = time.perf_counter()
    plainly = decoded(engine, prompts, params, speculate=False)
    plain.append(engine.stats)
    quick = engine.parallel.same(time.perf_counter() - began < SHORT_RUN)  # each process has its own clock
    for _ in range(RUNS - 1 if quick else 0):
        decoded(engine, prompts, params)
        speculative.append(engine.stats)
        decoded(engine, prompts, params, speculate=False)
        plain.append(engine.stats)
    for stats in plain + speculative:
        stats.prefill_seconds, stats.prefill_tokens = first.prefill_seconds, first.prefill_tokens
    greedy = [index for index, p in enumerate(params) if p.temperature == 0]
    outputs = [(index, prompts[index], plainly[index].tokens, shown[index].tokens) for index in greedy]
    found = differences(outputs, lambda ids: engine.logits(ids, last=1)[0])
    is_quantized = engine.config.quantize is not None or engine.config.kv_dtype in QUANTIZED_CACHES
    unquantized = plainly_unquantized(engine, model, prompts, params, len(plain)) if is_quantized else None
    return Comparison(plain, speculative, len(greedy), found, unquantized)


def decoded(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, speculate: bool = True
) -> list[Completion]:
    """Engine.generate, which tells on_progress how far it is."""
    found, n, total = dict[int, Completion](), 0, sum(p.max_tokens for p in params)
    for event in engine.stream(prompts, params, speculate=speculate):
        n += len(event.tokens)
        if event.completion:
            found[event.index] = event.completion
        if engine.on_progress:  # a row may end before it has all its tokens
            engine.on_progress("decode", total if len(found) == len(prompts) else n, total)
    return [found[index] for index in range(len(prompts))]


def plainly_unquantized(
    engine: Engine, model: str, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], runs: int
) -> list[EngineStats] | str:
    """Runs of plain decoding by an engine of the same model with nothing quantized; or why there are none."""
    config = replace(engine.config, quantize=None, kv_dtype=None)
    other, why = None, "not every process has room for it"
    try:
        if engine.config.quantize is None:
            other = Engine(engine.model, engine.tokenizer, config, DraftConfig(), parallel=engine.parallel)
        else:
            other = Engine.from_pretrained(model, config, DraftConfig(), parallel=engine.parallel)
    except ValueError as error:
        why = str(error)
    # free memory is each process's own: where one cannot, the others would wait for it
    if not engine.parallel.everywhere(other is not None) or other is None:
        return why
    with other:
        if other.config.quantize is not None:
            return f"its checkpoint stores weights in {other.config.quantize}, which run as they are"
        other.on_progress = engine.on_progress
        other.warm_up()
        found = []
        for _ in range(runs):
            decoded(other, prompts, params)
            found.append(other.stats)
    return found
