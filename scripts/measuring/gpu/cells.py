"""Steps and rounds of a model of 8 B parameters with random weights, acceptance replayed.

Shapes: B batch rows, T tokens in this call, S cache capacity, L layers, K kv heads, gamma tokens drafted per round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd.config import DraftConfig, EngineConfig, SamplingParams, gamma_tiers
from gpt_fast_sd.engine import Engine
from gpt_fast_sd.quantization.table import precision, require_precision
from gpt_fast_sd.sampling import GREEDY
from gpt_fast_sd.serving.gamma_planner import GammaPlanner
from gpt_fast_sd.state import RoundPlan
from measuring.gpu.aims import LLAMA, ROOM, Arm, Cell, planned, predict
from measuring.gpu.setup import SMALL, Record, Setup, Stopwatch, random_model
from measuring.machine import clocks
from measuring.replay import Replay, replay_table
from measuring.roofline import EXPECTED, IDEAL, PRACTICAL, Conditions, step_seconds
from measuring.turns import spread

ROUNDS = 40  # of one run: few enough that the context stays within 1 % of where it began
TO_THE_END = 96  # new tokens of the runs that go on until the last row is finished
PLENTY = 2**30  # tokens that a row may still emit, where none is to end


def fake_prefill(engine: Engine, prompts: Sequence[Sequence[int]]) -> None:
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
        self.arm = arm
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
            DraftConfig(policy=arm.policy, budget=budget, gamma=max(self.timed), quantize=arm.quantize),
        )  # fmt: skip
        self.budget = budget
        self.params = SamplingParams(max_tokens=room - 1, ignore_eos=True)
        # each prompt begins otherwise, so that no slot is compared with another's to its end
        generator = torch.Generator().manual_seed(0)
        self.prompts = [
            [slot, *torch.randint(config.vocab_size, (context,), generator=generator).tolist()] for slot in range(batch)
        ]
        engine = self.engine
        engine.replay = self.kept = Replay(torch.zeros(4 * self.rounds, batch, dtype=torch.int64, device=setup.device))
        engine._prefill._warm = True  # nothing will be prefilled, so nothing is compiled for it
        engine.warm_up()
        with torch.inference_mode():  # as rounds run: outside of it the steps would be compiled once more
            engine.schedule.rounds.warm_up([0, *self.timed], [GREEDY])
        fake_prefill(engine, self.prompts)

    # ---------------------------------------------------------------- rounds

    def replay(self, profile: str) -> float:
        """Replay this profile from now on -> tokens per round of its table."""
        gamma, table = self.gammas[profile], self.kept.table
        table.copy_(replay_table(self.arm.profile(profile), len(table), self.batch, gamma, 0, self.setup.device))
        self.engine.schedule.planner = GammaPlanner(gamma, gamma_tiers(self.config.group_size))
        return float(table.double().mean()) + 1

    def run(self, speculate: bool, rounds: int | None = None, new: int | None = None) -> Record:
        """So many rounds, or so many new tokens of each row -> tokens, seconds of decoding and rounds.

        RuntimeError where the tokens are not those of the table, or where a row idled: then the seconds mean nothing.
        """
        engine, params = self.engine, self.params if new is None else replace(self.params, max_tokens=new)
        self.kept.rewind()
        stream = engine.stream(self.prompts, params, speculate=speculate)
        for _ in stream:
            if rounds and engine.stats.rounds >= rounds:
                break
        stats = engine.stats
        stream.close()  # type: ignore[attr-defined]
        owed, told = self.batch * (new or stats.rounds), "one per row and round"
        if new:
            told = f"{new} per row"
        elif speculate:
            owed, told = int((self.kept.table[: stats.rounds] + 1).sum()), "as the table says"
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
        state, policy, rounds = self.engine.state, self.engine.policy, self.engine.schedule.rounds
        assert policy
        self.watch = Stopwatch(self.setup, repeats=20)
        found: Record = {"verify": {}, "judge": {}, "draft": {}, "select": {}}
        self.save_state()
        for gamma in self.timed:
            plan = RoundPlan(gamma=gamma, n_keys=self.engine.cache.capacity - gamma, captured=True)
            self.restore_state(gamma)
            draft = policy.propose(state, plan)
            tokens = torch.cat([state.pending[:, None], draft.tokens], 1)  # [B, gamma + 1]
            logits, mass = rounds.feed(tokens, plan.n_keys + gamma)
            if "target" not in found:
                found["target"] = self.figure("target", 0, partial(rounds.feed, state.pending[:, None], plan.n_keys))
            parts: dict[str, Callable[[], object]] = {
                "draft": partial(policy.propose, state, plan),
                "verify": partial(rounds.feed, tokens, plan.n_keys + gamma),
                "judge": partial(rounds.accept, logits, draft, GREEDY),
            }
            if policy.wants_mass:
                parts["select"] = partial(policy.device_after_verify, state, mass)
            for name, part in parts.items():
                found[name][str(gamma)] = self.figure(name, gamma, part)
        state.active.fill_(False)
        for slot in range(self.batch):
            policy.host_free(slot)
        return found

    def figure(self, name: str, gamma: int, call: Callable[[], object]) -> Record:
        """Seconds of a call (of a draft, of a step of it), and what it did; RuntimeError where that is not enough."""
        fed = {"target": 1, "verify": gamma + 1, "draft": gamma}.get(name, 0)
        seen = self.observe(gamma, call, fed, drafts=name == "draft")
        if wrong := self.idle(name, gamma, fed, seen):
            raise RuntimeError(f"{name} at gamma {gamma} is not timed: {wrong}")
        seconds = self.watch(call, before=partial(self.restore_state, gamma)) / (gamma if name == "draft" else 1)
        return {"seconds": seconds, "gamma": gamma, **seen}

    def save_state(self) -> None:
        """Save the state of rows in the middle of decoding, from which every timed call starts."""
        engine, policy = self.engine, self.engine.policy
        state = engine.state
        assert policy
        state.seq_len.fill_(self.context)
        state.active.fill_(True)
        state.stop_on_eos.fill_(False)
        state.remaining.fill_(PLENTY)
        self.kept.rewind()
        for slot, prompt in enumerate(self.prompts):
            policy.host_admit(slot, prompt)
            state.pending[slot] = prompt[-1]
        # a view that lists by a pass of its own has no list before
        engine.schedule.rounds.refresh(
            RoundPlan.of(dict.fromkeys(range(self.batch), self.context), gamma=max(self.timed))
        )
        owners = (state, self.kept, self._view())
        tensors = {id(x): x for owner in owners for x in vars(owner).values() if isinstance(x, Tensor)}
        self._saved = [(x, x.clone()) for x in tensors.values()]

    def restore_state(self, gamma: int) -> None:
        """Restore that state, to keep every other draft; on the device alone, so that it may run between repeats."""
        for tensor, value in self._saved:
            tensor.copy_(value)
        self.kept.table.fill_((gamma + 1) // 2)

    def observe(self, gamma: int, call: Callable[[], object], fed: int, drafts: bool) -> Record:
        """What a call does, from that state: rows that are live, tokens fed to each, least and most keys a row reads.

        Of a draft the keys of a layer and head; of judging the drafts judged and the tokens emitted, of selecting the
        rows whose selection is another afterwards.
        """
        self.restore_state(gamma)
        state, policy, view = self.engine.state, self.engine.policy, self._view()
        seen: Record = {"rows_active": int(state.active.sum())}
        kv_indices, before = getattr(view, "kv_indices", None), state.seq_len.clone()
        held = None if kv_indices is None else kv_indices.clone()
        out = call()
        if fed:
            last = torch.where(state.active, state.seq_len, -fed) + fed - 1  # [B] an idle row reads nothing
            read = [last + 1]
            if drafts:  # by the first and by the last of its steps
                read = [policy.positions_read(at).sum(-1) for at in (last - fed + 1, last)]  # type: ignore[union-attr]
            seen["tokens_fed"] = fed
            seen["keys_in_view"] = [int(read[0].min()), int(read[-1].max())]
        elif isinstance(out, Tensor):
            seen["tokens_judged"], seen["tokens_emitted"] = out[:, 1].tolist(), out[:, 0].tolist()
            seen["rows_grown"] = int((state.seq_len > before).sum())
        elif kv_indices is not None and held is not None:
            seen["rows_selected"] = int((kv_indices != held).any(-1).any(-1).any(0).sum())
        return seen

    def idle(self, name: str, gamma: int, fed: int, seen: Record) -> str | None:
        """Why what a call did is not what rows in the middle of decoding ask for; None where it is."""
        n, kept = self.batch, (gamma + 1) // 2
        if seen["rows_active"] != n:
            return f"of {n} rows only {seen['rows_active']} are active"
        if fed:
            least = most = self.context + fed
            if name == "draft":  # a selection that is new leaves room for the tokens until the next one
                least, most = int(0.7 * self.budget), self.budget + gamma
            read = seen["keys_in_view"]
            fine = least <= read[0] <= read[1] <= most
            return None if fine else f"rows read {read[0]:,} to {read[1]:,} keys, not {least:,} to {most:,}"
        wanted = {"tokens_judged": [gamma] * n, "tokens_emitted": [kept + 1] * n, "rows_grown": n}
        wanted = {"rows_selected": n} if name == "select" else wanted
        wrong = {key: seen.get(key) for key, value in wanted.items() if seen.get(key) != value}
        return f"{wrong} should be { ({key: wanted[key] for key in wrong}) }" if wrong else None

    def _view(self) -> Any:
        """The view that drafts are read through: it owns what a selection has chosen."""
        return getattr(self.engine.policy, "view", None)


def cell_stage(context: int, arm: Arm) -> Callable[[Setup], Record]:
    """The stage that measures one policy over rows of one length: steps, then rounds with replayed acceptance.

    Of a precision that the device does not run it finds the sentence that says so.
    """

    def run(setup: Setup) -> Record:
        try:
            dtype = torch.bfloat16 if setup.on_cuda else torch.float32
            require_precision(arm.quantize, setup.device, dtype, of_draft=True)
        except ValueError as error:
            print(f"not run: {error}")
            return {"arm": arm.name, "skipped": str(error)}
        cell = setup.cell(context, *([arm] if arm.quantize else []))
        gammas = {profile: planned(setup.chip, cell, arm, profile).gamma for profile in arm.profiles}
        if setup.tiny:
            gammas = {profile: min(gamma, 2) for profile, gamma in gammas.items()}
        began = time.perf_counter()
        bench = Bench(setup, cell, arm, gammas)
        built = time.perf_counter() - began
        print(f"{cell.name}: built and compiled in {built:.0f} s; gamma by the cost model: {gammas}")
        steps = bench.steps()
        ceilings = ceilings_of(setup, bench)
        print(f"plain step {steps['target']['seconds'] * 1e3:.2f} ms, roofline {ceilings['target'] * 1e3:.2f} ms")
        replayed = [replay_row(setup, cell, arm, bench, profile) for profile in arm.profiles]
        for row in replayed:
            said = f"{row['ratio']['median']:.2f}x, expected {row['predicted_expected']:.2f}x"
            print(f"replay of {row['profile']}, gamma {row['gamma']}: {said}")
        return {
            "cell": cell.name, "planned_batch": cell.batch, "arm": arm.name,
            "policy": arm.policy, "budget": bench.budget, "quantize": arm.quantize,
            "batch": bench.batch, "context": bench.context,
            "chip": asdict(setup.chip), "build_seconds": built, "steps": steps, "roofline": ceilings,
            "replay": replayed, "just_after": clocks() if setup.on_cuda else {},
        }  # fmt: skip

    return run


def ceilings_of(setup: Setup, bench: Bench) -> Record:
    """Seconds of the steps that the roofline allows, on the shape that was run."""
    under = Conditions(weight_bytes=bench.itemsize, kv_bytes=bench.itemsize)
    drafts = under
    if bench.arm.quantize:
        entry = precision(bench.arm.quantize, setup.device)
        head = precision(entry.head, setup.device)
        drafts = replace(under, weight_bytes=entry.per_weight, head_bytes=head.per_weight)

    def floor(n_tokens: int, context: int, under: Conditions = under) -> float:
        return step_seconds(bench.config, setup.chip, bench.batch, n_tokens, context, under)

    return {
        "target": floor(1, bench.context),
        "draft": {str(gamma): floor(1, bench.budget, drafts) for gamma in bench.timed},
        "verify": {str(gamma): floor(gamma + 1, bench.context) for gamma in bench.timed},
    }


def replay_row(setup: Setup, cell: Cell, arm: Arm, bench: Bench, profile: str) -> Record:
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
        for name, efficiency in {"ideal": IDEAL, "practical": PRACTICAL, "expected": EXPECTED}.items()
    }
    drafted = {g for run in runs[True] for g in run["gammas"]}
    plain = {g for run in runs[False] for g in run["gammas"]}
    if (drafted, plain) != ({gamma}, {0}):
        raise RuntimeError(f"rounds drafted {drafted} tokens and plain ones {plain}, not {gamma} and 0")
    return {
        "profile": profile, "replayed": True, "gamma": gamma, "tokens_per_round_of_table": tokens,
        **{f"predicted_{name}": ratio for name, ratio in predicted.items()},
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
