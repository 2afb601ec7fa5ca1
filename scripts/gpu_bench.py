"""Stages of gpu_suite.py that time steps and rounds: of a model of 8 B parameters, and of the bundled one.

Shapes: B batch rows, T tokens in this call, S cache capacity, L layers, K kv heads, gamma tokens drafted a round.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout runs without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor

from frontier import spread, stretches, take_turns, tokens_of
from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.config import gamma_tiers
from gpt_fast_sd.loading import BUNDLED
from gpt_fast_sd.model import SPLIT
from gpt_fast_sd.planner import GammaPlanner
from gpt_fast_sd.replay import PROFILES, Replay, replay_table
from gpt_fast_sd.roofline import EXPECTED, IDEAL, PRACTICAL, Forecast, step_seconds
from gpu_forecast import LLAMA, ROOM, Arm, Cell, planned, predict
from gpu_setup import SMALL, Record, Setup, Stopwatch, clocks, random_model

# ---- a model of 8 B parameters with random weights -------------------------------------------------------------------

ROUNDS = 40  # of one run: few enough that the context stays within 1 % of where it began
TO_THE_END = 96  # new tokens of the runs that go on until the last row is finished
PLENTY = 2**30  # tokens that a row may still emit, where none is to end


def pretend(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
    """Let the slots hold these prompts, over random keys and values: a step costs what it would after a prefill."""
    for buffer in engine.cache.buffers:
        buffer.normal_()
    for slot, prompt in enumerate(prompts):
        engine._prefill._held[slot] = list(prompt[:-1])


class Bench:
    """An engine of a cell's shape with random weights and keys, whose rows keep as many drafts as a table says.

    Before a call is timed it runs once under observation, from the very state that every timed repeat starts from: what
    it did stands beside its seconds, and a call that let rows idle or read too few keys is not timed but an error.
    """

    def __init__(self, setup: Setup, cell: Cell, arm: Arm, gammas: Mapping[str, int]) -> None:
        """gammas: what is drafted where a profile is replayed."""
        batch, context = (2, 320) if setup.tiny else (cell.batch, cell.context)
        config = replace(SMALL, max_seq_len=1024) if setup.tiny else LLAMA
        budget = min(arm.budget, 128) if setup.tiny else arm.budget
        self.setup, self.gammas, self.context, self.batch, self.config = setup, gammas, context, batch, config
        self.timed = sorted({*gammas.values(), *arm.also_timed})
        self.rounds = 3 if setup.tiny else ROUNDS
        dtype = "bf16" if setup.on_cuda else "fp32"
        model = random_model(config, setup.device, torch.bfloat16 if setup.on_cuda else torch.float32)
        self.itemsize = model.embedding.weight.element_size()
        room = 2 * self.rounds * (max(self.timed) + 1) if setup.tiny else ROOM
        self.engine = Engine(
            model, None,
            EngineConfig(
                batch_size=batch, max_seq_len=context + room, device=setup.device.type, dtype=dtype,
                compile=setup.on_cuda, cuda_graphs="round", max_autotune=setup.max_autotune,
            ),
            DraftConfig(policy=arm.policy, budget=budget, gamma=max(self.timed)),
        )  # fmt: skip
        self.budget = budget
        self.params = SamplingParams(max_tokens=room - 1, ignore_eos=True)
        # each prompt begins otherwise, so that no slot is compared with another's to its end
        generator = torch.Generator().manual_seed(0)
        self.prompts = [
            [slot, *torch.randint(config.vocab_size, (context,), generator=generator).tolist()] for slot in range(batch)
        ]
        engine = self.engine
        engine.replay = Replay(torch.zeros(4 * self.rounds, batch, dtype=torch.int64, device=setup.device))
        engine._prefill._warm = True  # nothing will be prefilled, so nothing is compiled for it
        engine.warm_up()
        with torch.inference_mode():  # as rounds run: outside of it the steps would be compiled once more
            engine.rounds.warm_up([0, *self.timed], [(False, False)])
        pretend(engine, self.prompts)

    # ---------------------------------------------------------------- rounds

    def replay(self, profile: str) -> float:
        """Replay this profile from now on -> tokens a round of its table."""
        gamma, replay = self.gammas[profile], self.engine.replay
        assert replay is not None
        replay.table.copy_(replay_table(PROFILES[profile], len(replay.table), self.batch, gamma, 0, self.setup.device))
        self.engine.schedule.planner = GammaPlanner(gamma, gamma_tiers(self.config.group_size))
        return float(replay.table.double().mean()) + 1

    def run(self, speculate: bool, rounds: int | None = None, new: int | None = None) -> Record:
        """So many rounds, or so many new tokens of each row -> tokens, seconds of decoding and rounds.

        RuntimeError where the tokens are not those of the table, or where a row idled: then the seconds mean nothing.
        """
        engine, params = self.engine, self.params if new is None else replace(self.params, max_tokens=new)
        assert engine.replay is not None
        engine.replay.rewind()
        stream = engine.stream(self.prompts, params, speculate=speculate)
        for _ in stream:
            if rounds and engine.stats.rounds >= rounds:
                break
        stats = engine.stats
        stream.close()  # type: ignore[attr-defined]
        owed, told = self.batch * (new or stats.rounds), "one a row and round"
        if new:
            told = f"{new} a row"
        elif speculate:
            owed, told = int((engine.replay.table[: stats.rounds] + 1).sum()), "as the table says"
        if stats.decode_tokens != owed or (not new and stats.row_rounds != self.batch * stats.rounds):
            raise RuntimeError(
                f"{stats.rounds} rounds of {self.batch} rows gave {stats.decode_tokens} tokens in {stats.row_rounds} "
                f"rounds of a row, but they owe {owed}, {told}"
            )
        return {
            "tokens": stats.decode_tokens, "seconds": stats.decode_seconds, "rounds": stats.rounds,
            "rows_active": stats.row_rounds / stats.rounds, "gammas": sorted(stats.rounds_by_gamma),
        }  # fmt: skip

    # ---------------------------------------------------------------- steps

    @torch.inference_mode()
    def steps(self) -> Record:
        """Figures of the parts of a round: T_T, T_D, T_V by gamma, judging with commit, selecting by mass."""
        rows, policy, rounds = self.engine.rows, self.engine.policy, self.engine.rounds
        assert policy
        self.watch = Stopwatch(self.setup, repeats=20)
        found: Record = {"verify": {}, "judge": {}, "draft": {}, "select": {}}
        self.strike()
        for gamma in self.timed:
            with rows.capturing(self.engine.cache.capacity - gamma):
                self.pose(gamma)
                draft = policy.propose(rows, gamma)
                tokens = torch.cat([rows.pending[:, None], draft.tokens], 1)  # [B, gamma + 1]
                logits, mass = rounds.feed(tokens, rows.n_keys + gamma)
                if "target" not in found:
                    found["target"] = self.figure("target", 0, lambda: rounds.feed(rows.pending[:, None], rows.n_keys))
                parts: dict[str, Callable[[], object]] = {
                    "draft": partial(policy.propose, rows, gamma),
                    "verify": partial(rounds.feed, tokens, rows.n_keys + gamma),
                    "judge": partial(rounds.judged, logits, draft),
                }
                if policy.wants_mass:
                    parts["select"] = partial(policy.device_after_verify, rows, mass)
                for name, part in parts.items():
                    found[name][str(gamma)] = self.figure(name, gamma, part)
        rows.active.fill_(False)
        for slot in range(self.batch):
            policy.host_free(slot)
        return found

    def figure(self, name: str, gamma: int, call: Callable[[], object]) -> Record:
        """Seconds of a call (of a draft, of a step of it), and what it did; RuntimeError where that is not enough."""
        seen = self.observe(gamma, call)
        if wrong := self.idle(name, gamma, seen):
            raise RuntimeError(f"{name} at gamma {gamma} is not timed: {wrong}")
        seconds = self.watch(call, before=partial(self.pose, gamma)) / (gamma if name == "draft" else 1)
        return {"seconds": seconds, "gamma": gamma, **seen}

    def strike(self) -> None:
        """Remember the pose of rows in the middle of decoding, from which every timed call starts."""
        engine, policy = self.engine, self.engine.policy
        rows = engine.rows
        assert policy and engine.replay
        rows.seq_len.fill_(self.context)
        rows.active.fill_(True)
        rows.heeds_eos.fill_(False)
        rows.remaining.fill_(PLENTY)
        engine.replay.rewind()
        for slot, prompt in enumerate(self.prompts):
            policy.host_admit(slot, prompt)
            rows.pending[slot] = prompt[-1]
        rows.lengths = dict.fromkeys(range(self.batch), self.context)
        engine.rounds.refresh()  # a view that lists by a pass of its own has no list before
        owners = (rows, engine.replay, self._view())
        tensors = {id(x): x for owner in owners for x in vars(owner).values() if isinstance(x, Tensor)}
        self._struck = [(x, x.clone()) for x in tensors.values()]

    def pose(self, gamma: int) -> None:
        """Take the pose again, to keep every other draft; on the device alone, so that it may stand between repeats."""
        for tensor, value in self._struck:
            tensor.copy_(value)
        assert self.engine.replay
        self.engine.replay.table.fill_((gamma + 1) // 2)

    def observe(self, gamma: int, call: Callable[[], object]) -> Record:
        """What a call does, from the pose: rows that are live, tokens fed to each, least and most keys a row reads.

        Of a draft the keys of a layer and head; of judging the drafts judged and the tokens emitted, of selecting the
        rows whose selection is another afterwards.
        """
        self.pose(gamma)
        rows, view = self.engine.rows, self._view()
        seen: Record = {"rows_active": int(rows.active.sum())}
        slots, before = getattr(view, "slots", None), rows.seq_len.clone()
        held = None if slots is None else slots.clone()
        with self._watched() as fed:
            out = call()
        if fed:
            keys = torch.stack([torch.stack([read.min(), read.max()]) for _, read in fed]).tolist()
            seen["tokens_fed"] = sum(n for n, _ in fed)
            seen["keys_in_view"] = [min(least for least, _ in keys), max(most for _, most in keys)]
        elif isinstance(out, Tensor):
            seen["tokens_judged"], seen["tokens_emitted"] = out[:, 1].tolist(), out[:, 0].tolist()
            seen["rows_grown"] = int((rows.seq_len > before).sum())
        elif slots is not None and held is not None:
            seen["rows_selected"] = int((slots != held).any(-1).any(-1).any(0).sum())
        return seen

    def idle(self, name: str, gamma: int, seen: Record) -> str | None:
        """Why what a call did is not what rows in the middle of decoding ask for; None where it is."""
        n, fed = self.batch, gamma + 1 if name == "verify" else gamma if name == "draft" else 1
        if seen["rows_active"] != n:
            return f"of {n} rows only {seen['rows_active']} are active"
        if name == "judge":
            kept = (gamma + 1) // 2
            wanted = {"tokens_judged": [gamma] * n, "tokens_emitted": [kept + 1] * n, "rows_grown": n}
        elif name == "select":
            wanted = {"rows_selected": n}
        else:
            wanted = {"tokens_fed": fed}
            least, most = self.context + fed, self.context + fed
            if name == "draft":  # a selection that is new leaves room for the tokens until the next one
                least, most = int(0.7 * self.budget), self.budget + gamma
            read = seen.get("keys_in_view", [0, 0])
            if not least <= read[0] <= read[1] <= most:
                return f"rows read {read[0]:,} to {read[1]:,} keys, not {least:,} to {most:,}"
        wrong = {key: seen.get(key) for key, value in wanted.items() if seen.get(key) != value}
        return f"{wrong} should be { ({key: wanted[key] for key in wrong}) }" if wrong else None

    def _view(self) -> Any:
        """The view that drafts are read through: it owns what a selection has chosen."""
        return getattr(self.engine.policy, "view", None)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[list[tuple[int, Tensor]]]:
        """Notes of every step inside: tokens fed to a row, and how many keys each row reads, int64 [...]."""
        rounds, policy, notes = self.engine.rounds, self.engine.policy, list[tuple[int, Tensor]]()
        decode, verify, feed = rounds.decode, rounds.verify, policy.feed  # type: ignore[union-attr]

        def noting(step: Callable[..., Any]) -> Callable[..., Any]:
            def noted(
                model: Any, tokens: Tensor, pos: Tensor, layers: Any, in_view: Tensor, *rest: Any, **how: Any
            ) -> Any:
                read = torch.where(pos < in_view.shape[0] * SPLIT, pos + 1, 0)  # [B, T]
                notes.append((tokens.shape[1], read.amax(1)))
                return step(model, tokens, pos, layers, in_view, *rest, **how)

            return noted

        def drafting(tokens: Tensor, pos: Tensor, *rest: Any) -> Any:
            out = feed(tokens, pos, *rest)
            notes.append((tokens.shape[1], policy.positions_read(pos[:, -1]).sum(-1)))  # type: ignore[union-attr]
            return out

        rounds.decode, rounds.verify = noting(decode), noting(verify)  # type: ignore[assignment]
        policy.feed = drafting  # type: ignore[union-attr]
        try:
            yield notes
        finally:
            rounds.decode, rounds.verify = decode, verify
            del policy.feed  # type: ignore[union-attr]


def cell_stage(context: int, arm: Arm) -> Callable[[Setup], Record]:
    """The stage that measures one policy over rows of one length: steps, then rounds with replayed acceptance."""

    def run(setup: Setup) -> Record:
        cell = setup.cell(context)
        plans = {profile: planned(setup.chip, cell, arm, profile) for profile in arm.profiles}
        gammas = {profile: min(plan.gamma, 2) if setup.tiny else plan.gamma for profile, plan in plans.items()}
        began = time.perf_counter()
        bench = Bench(setup, cell, arm, gammas)
        built = time.perf_counter() - began
        print(f"{cell.label}: built and compiled in {built:.0f} s; gamma by the cost model: {gammas}")
        steps = bench.steps()
        ceilings = ceilings_of(setup, bench)
        for name, seconds in ceilings.items():
            print(f"{name:>8} ms: {_ms(steps[name])}, roofline {_ms(seconds)}")
        print(f"   judge ms: {_ms(steps['judge'])}; selecting {_ms(steps['select']) or 'nothing'}")
        replayed = []
        for profile, plan in plans.items():
            row = replay_row(setup, cell, arm, bench, profile, plan)
            replayed.append(row)
            print(
                f"replay of {profile}, gamma {row['gamma']}: {row['ratio']['median']:.2f}x "
                f"({row['ratio']['min']:.2f} to {row['ratio']['max']:.2f}), "
                f"cost model {row['predicted_practical']:.2f}x, expected {row['predicted_expected']:.2f}x"
            )
        return {
            "cell": cell.name, "planned_batch": cell.batch, "arm": arm.name,
            "policy": arm.policy, "budget": bench.budget, "batch": bench.batch, "context": bench.context,
            "chip": asdict(setup.chip), "build_seconds": built, "steps": steps, "roofline": ceilings,
            "replay": replayed, "just_after": clocks() if setup.on_cuda else {},
        }  # fmt: skip

    return run


def _ms(seconds: float | Mapping[str, Any]) -> str:
    """One figure, or those by gamma."""
    if isinstance(seconds, Mapping) and "seconds" not in seconds:
        return ", ".join(f"{_ms(value)} (gamma {gamma})" for gamma, value in seconds.items())
    value: float = seconds["seconds"] if isinstance(seconds, Mapping) else seconds
    return f"{value * 1e3:.3f}"


def ceilings_of(setup: Setup, bench: Bench) -> Record:
    """Seconds of the steps that the roofline allows, on the shape that was run."""

    def floor(n_tokens: int, context: int) -> float:
        size = bench.itemsize
        return step_seconds(
            bench.config, setup.chip, bench.batch, n_tokens, context, weight_bytes=size, kv_bytes=size, efficiency=IDEAL
        )

    return {
        "target": floor(1, bench.context),
        "draft": {str(gamma): floor(1, bench.budget) for gamma in bench.timed},
        "verify": {str(gamma): floor(gamma + 1, bench.context) for gamma in bench.timed},
    }


def replay_row(setup: Setup, cell: Cell, arm: Arm, bench: Bench, profile: str, plan: Forecast) -> Record:
    """Plain and speculative rounds in turns, A B B A, acceptance replayed; a ratio is that of a pair."""
    gamma = bench.gammas[profile]
    tokens = bench.replay(profile)
    for speculate in (True, False):  # captures
        bench.run(speculate, rounds=2)
    runs: dict[bool, list[Record]] = {True: [], False: []}
    for pair in range(setup.pairs):
        for speculate in (False, True) if pair % 2 == 0 else (True, False):
            runs[speculate].append(bench.run(speculate, rounds=bench.rounds))
    speeds = {how: [run["tokens"] / run["seconds"] for run in those] for how, those in runs.items()}
    new = 4 if setup.tiny else TO_THE_END
    whole = {how: bench.run(how, new=new) for how in (False, True)}
    predicted = {
        name: predict(setup.chip, cell, arm, profile, gamma, efficiency).ratio
        for name, efficiency in (("ideal", IDEAL), ("practical", PRACTICAL), ("expected", EXPECTED))
    }
    drafted = {g for run in runs[True] for g in run["gammas"]}
    plain = {g for run in runs[False] for g in run["gammas"]}
    if (drafted, plain) != ({gamma}, {0}):
        raise RuntimeError(f"rounds drafted {drafted} tokens and plain ones {plain}, not {gamma} and 0")
    return {
        "profile": profile, "replayed": True, "gamma": gamma, "tokens_per_round_of_table": tokens,
        **{f"predicted_{name}": ratio for name, ratio in predicted.items()}, "predicted_tokens": plan.tokens,
        "ratio": spread([s / p for s, p in zip(speeds[True], speeds[False], strict=True)]),
        "plain_tokens_per_second": statistics.median(speeds[False]),
        "replayed_tokens_per_second": statistics.median(speeds[True]),
        "tokens_per_round": sum(r["tokens"] for r in runs[True]) / sum(r["rounds"] for r in runs[True]) / bench.batch,
        # what the runs did: rows that were live in a round, on average, and where their keys began and ended
        "rows_active": min(run["rows_active"] for those in runs.values() for run in those),
        "keys_in_view": [bench.context + 1, bench.context + bench.rounds * (gamma + 1)],
        "rounds_of_a_run": bench.rounds, "pairs": setup.pairs,
        "to_the_end_ratio": whole[False]["seconds"] / whole[True]["seconds"], "to_the_end_new_tokens": new,
    }  # fmt: skip


# ---- the bundled model, with acceptance of its own -------------------------------------------------------------------

END_TO_END = {"8x8192": (8, 8192), "32x8192": (32, 8192), "8x16000": (8, 16000), "32x16000": (32, 16000)}


def bundled_stage(name: str) -> Callable[[Setup], Record]:
    """The stage that decodes with the bundled model, plainly and speculatively in turns; nothing is replayed."""

    def run(setup: Setup) -> Record:
        batch, context = (2, 160) if setup.tiny else END_TO_END[name]
        new, temperature = (4, 0.8) if setup.tiny else (128, 0.8)
        config = EngineConfig(
            batch_size=batch, max_seq_len=context + new, device=setup.device.type, compile=setup.on_cuda,
            max_autotune=setup.max_autotune,
        )  # fmt: skip
        engine = Engine.from_pretrained(BUNDLED, config)
        prompts = long_prompts(setup, engine, batch, context)
        params = [
            SamplingParams(max_tokens=new, ignore_eos=True, temperature=temperature, seed=i) for i in range(batch)
        ]
        found: list[Record] = []
        for policy, budget in (("streaming", 256), ("snapkv", 512), ("guided", 512)):
            engine.redraft(DraftConfig(policy=policy, budget=min(budget, 96) if setup.tiny else budget, gamma=4))
            pairs = take_turns(engine, prompts, params, 1 if setup.tiny else setup.pairs)
            counts = pairs.counts
            for stats in (*pairs.plain, *pairs.speculative):  # else tokens a second mean nothing
                if stats.decode_tokens != batch * new or min(map(len, prompts)) != context:
                    raise RuntimeError(f"a run gave {stats.decode_tokens} tokens, not {new} for each of {batch} rows")
            found.append(
                {
                    "policy": policy, "budget": engine.draft.budget, "gamma": 4, "ratio": spread(pairs.ratios),
                    "acceptance_rate": counts.acceptance_rate, "tokens_per_round": counts.tokens_per_round,
                    "rows_active": counts.row_rounds / counts.rounds, "keys_in_view": [context, context + new - 1],
                    "plain_tokens_per_second": statistics.median(s.decode_tokens_per_second for s in pairs.plain),
                    "speculative_tokens_per_second": statistics.median(
                        s.decode_tokens_per_second for s in pairs.speculative
                    ),
                }
            )  # fmt: skip
            print(
                f"{policy} {engine.draft.budget}: {found[-1]['ratio']['median']:.2f}x, "
                f"acceptance {counts.acceptance_rate:.1%}, {counts.tokens_per_round:.2f} tokens a round"
            )
        return {
            "batch": batch, "context": context, "new_tokens": new, "temperature": temperature, "results": found,
            "text": [path.name for path in setup.texts] or "sampled by the model itself, temperature 1",
        }  # fmt: skip

    return run


def long_prompts(setup: Setup, engine: Engine, batch: int, context: int) -> list[list[int]]:
    """A prompt for each row: a stretch of the texts given, or what the model writes after its bundled document."""
    tokenizer = engine.tokenizer
    assert tokenizer
    if setup.texts:
        texts = {path.name: tokens_of(path, tokenizer) for path in setup.texts}
        return stretches(texts, batch, context, tokenizer.bos_id)
    document = tokens_of(BUNDLED / "document.txt", tokenizer)
    start = min(len(document) // 2, context // 2)
    openings = [document[row * 37 :][:start] for row in range(batch)]
    params = [
        SamplingParams(max_tokens=context - start, ignore_eos=True, temperature=1.0, seed=i) for i in range(batch)
    ]
    written = engine.generate(openings, params, speculate=False)
    return [opening + list(one.tokens) for opening, one in zip(openings, written, strict=True)]
