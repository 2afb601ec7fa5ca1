"""Steps and rounds of a model of 8 B parameters with random weights, acceptance replayed: what a cell is and gives.

Shapes: B batch rows, T tokens in this call, S cache capacity, gamma tokens drafted per round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.model import preset
from gpt_fast_sd.policies.config import gamma_tiers
from gpt_fast_sd.quantization.table import require_precision
from gpt_fast_sd.sampling import GREEDY
from gpt_fast_sd.serving.gamma_planner import GammaPlanner
from gpt_fast_sd.state import RoundPlan
from measuring.chips import CHIPS, GIB, Chip
from measuring.forecast import System
from measuring.gpu.setup import SMALL, Record, Setup, Stopwatch, random_model
from measuring.machine import clocks
from measuring.replay import PROFILES, Profile, Replay, replay_table
from measuring.roofline import EXPECTED, IDEAL, PRACTICAL, Efficiency, Forecast, best_gamma
from measuring.turns import in_turns, spread

LLAMA = preset("meta-llama/Llama-3.1-8B")
MOST_DRAFTED = gamma_tiers(LLAMA.group_size)[-1]
ROOM, ROUNDS = 512, 40  # tokens behind the context; rounds of a run: the context stays within 1 % of where it began
PLENTY = 2**30  # tokens that a row may still emit, where none is to end
FULL = {57344: 16, 28672: 32, 100_000: 8}  # context -> rows that fill 139 GiB beside 15 GiB of weights
ALONE = {4096: 1, 32768: 1}  # where a draft's weights are most of what it reads


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A draft as it is measured; name: the published acceptance that it replays."""

    name: str
    policy: str
    budget: int
    quantize: str | None = None  # of the draft's weights

    def draft(self, gamma: int) -> DraftConfig:
        return DraftConfig(policy=self.policy, budget=self.budget, gamma=gamma, quantize=self.quantize)

    @property
    def profile(self) -> Profile:
        return PROFILES[self.name].with_weights(self.quantize)


OWN = {"guided": 1024, "snapkv": 2048, "streaming": 512}  # policies with the budgets of their published acceptance
ARMS = {name: Arm(name=name, policy=name, budget=budget) for name, budget in OWN.items()}
ARMS["low"] = replace(ARMS["streaming"], name="low")
PRECISIONS = {str(name): replace(ARMS["guided"], quantize=name) for name in (None, "int8", "float8", "int4", "planes")}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """So many rows of so many tokens each."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.context}"


def cell_for(context: int, memory: float, *arms: Arm) -> Cell:
    """The cell for so many free bytes: as many rows as every arm's plan allows; ValueError if that is none."""
    batch, system = (FULL | ALONE)[context], System(model=LLAMA, chip=replace(CHIPS["h200"], memory=memory), room=ROOM)
    while any(system.memory(arm.draft(MOST_DRAFTED), batch, context)[1] for arm in arms or ARMS.values()):
        if batch == 1:
            raise ValueError(f"not even one row of {context:,} tokens fits into {memory / GIB:.0f} GiB")
        batch -= 1
    return Cell(batch=batch, context=context)


def predict(chip: Chip, cell: Cell, arm: Arm, gamma: int, efficiency: Efficiency) -> Forecast:
    """The cost model's rounds of gamma drafts in a cell, whose rows are as unlike as those of a replay's table."""
    how: tuple[Any, ...] = arm.draft(gamma), arm.profile.chances, cell.batch, cell.context, gamma, efficiency
    return replace(System(model=LLAMA, chip=chip, room=ROOM).forecast(*how), tokens=arm.profile.tokens(gamma))


def planned(chip: Chip, cell: Cell, arm: Arm) -> Forecast:
    return best_gamma(lambda gamma: predict(chip, cell, arm, gamma, EXPECTED), range(1, MOST_DRAFTED + 1))


class Bench:
    """An engine of a cell's shape with random weights and keys, whose rows keep as many drafts as a table says.

    Before a call is timed it runs once from the very state that every timed repeat starts from: what it did stands
    beside its seconds, and a call that lets rows idle or reads too few keys is not timed but an error.
    """

    def __init__(self, setup: Setup, cell: Cell, arm: Arm, gamma: int) -> None:
        batch, context, self.room = (2, 320, 256) if setup.tiny else (cell.batch, cell.context, ROOM)
        self.config = replace(SMALL, max_seq_len=1024) if setup.tiny else LLAMA
        self.setup, self.arm, self.gamma, self.batch, self.context = setup, arm, gamma, batch, context
        self.rounds, self.budget = (3, min(arm.budget, 128)) if setup.tiny else (ROUNDS, arm.budget)
        model = random_model(self.config, setup.device, torch.bfloat16 if setup.on_cuda else torch.float32)
        self.engine = engine = Engine(
            model, None,
            EngineConfig(
                batch_size=batch, max_seq_len=context + self.room, device=setup.device.type, compile=setup.on_cuda,
                dtype="bf16" if setup.on_cuda else "fp32", cuda_graphs="round", max_autotune=setup.max_autotune,
            ),
            DraftConfig(policy=arm.policy, budget=self.budget, gamma=gamma, quantize=arm.quantize),
        )  # fmt: skip
        self.params = SamplingParams(max_tokens=self.room - 1, ignore_eos=True)
        ids = torch.randint(self.config.vocab_size, (batch, context), generator=torch.Generator().manual_seed(0))
        self.prompts = [[slot, *row] for slot, row in enumerate(ids.tolist())]  # none begins as another
        self.table = replay_table(arm.profile, 4 * self.rounds, batch, gamma, 0, setup.device)
        engine.replay = self.kept = Replay(self.table.clone())
        engine._prefill._warm = True  # nothing will be prefilled, so nothing is compiled for it
        engine.warm_up()
        with torch.inference_mode():  # as rounds run: outside of it the steps would be compiled once more
            engine.schedule.rounds.warm_up([0, gamma], [GREEDY])
        for buffer in engine.cache.buffers:  # a step costs what it would after a prefill
            buffer.normal_()
        for slot, prompt in enumerate(self.prompts):
            engine._prefill._held[slot] = prompt[:-1]
        engine.schedule.planner = GammaPlanner(gamma, gamma_tiers(self.config.group_size))

    def run(self, speculate: bool, rounds: int) -> Record:
        """So many rounds -> tokens a second and a round; RuntimeError where they are not the table's, or rows idled."""
        self.kept.table.copy_(self.table)
        self.kept.rewind()
        stream = self.engine.stream(self.prompts, self.params, speculate=speculate)
        for _ in stream:
            if self.engine.stats.rounds >= rounds:
                break
        stats = self.engine.stats
        stream.close()  # type: ignore[attr-defined]
        owed = int((self.table[: stats.rounds] + 1).sum()) if speculate else self.batch * stats.rounds
        did = stats.decode_tokens, stats.row_rounds, sorted(stats.rounds_by_gamma)
        must = owed, self.batch * stats.rounds, [self.gamma if speculate else 0]
        if did != must:
            raise RuntimeError(f"{stats.rounds} rounds came to (tokens, rounds of a row, gammas) {did}, not {must}")
        return {"per_second": owed / stats.decode_seconds, "per_round": owed / stats.rounds / self.batch}

    @torch.inference_mode()
    def steps(self) -> Record:
        """Seconds of the parts of a round: T_T, T_D, T_V, judging with commit, selecting by mass."""
        state, policy, rounds, gamma = self.engine.state, self.engine.policy, self.engine.schedule.rounds, self.gamma
        assert policy
        watch, n_keys = Stopwatch(self.setup, 20), self.engine.cache.capacity - gamma
        plan = RoundPlan(gamma=gamma, n_keys=n_keys, captured=True)
        self.save_state()
        draft = policy.propose(state, plan)
        tokens = torch.cat([state.pending[:, None], draft.tokens], 1)  # [B, gamma + 1]
        logits, mass = rounds.feed(tokens, n_keys + gamma)
        calls: dict[str, Callable[[], object]] = {
            "target": partial(rounds.feed, state.pending[:, None], n_keys),
            "draft": partial(policy.propose, state, plan), "verify": partial(rounds.feed, tokens, n_keys + gamma),
            "judge": partial(rounds.accept, logits, draft, GREEDY),
        }  # fmt: skip
        if policy.wants_mass:
            calls["select"] = partial(policy.device_after_verify, state, mass)
        found = {}
        for name, call in calls.items():
            seen, wrong = self.look(name, call)
            if wrong:
                raise RuntimeError(f"{name} at gamma {gamma} is not timed: {wrong}")
            seconds = watch(call, before=self.restore_state) / (gamma if name == "draft" else 1)
            found[name] = {"seconds": seconds, "gamma": gamma, "rows_active": self.batch, **seen}
        state.active.fill_(False)
        for slot in range(self.batch):
            policy.host_free(slot)
        return found

    def look(self, name: str, call: Callable[[], object]) -> tuple[Record, str]:
        """What a call does from the saved state; and why that is not what rows in the middle of decoding ask for."""
        self.restore_state()
        state, policy, gamma, n = self.engine.state, self.engine.policy, self.gamma, self.batch
        if (active := int(state.active.sum())) != n:
            return {}, f"of {n} rows only {active} are active"
        lists = getattr(self.view, "kv_indices", None)
        held, out = lists.clone() if lists is not None else None, call()
        if fed := {"target": 1, "verify": gamma + 1, "draft": gamma}.get(name, 0):
            least, most, read = self.context + fed, self.context + fed, [state.seq_len + fed]
            if name == "draft":  # its first and last step; a selection that is new leaves room until the next one
                least, most = int(0.7 * self.budget), self.budget + gamma
                read = [policy.positions_read(state.seq_len + i).sum(-1) for i in (0, fed - 1)]  # type: ignore[union-attr]
            keys = [int(read[0].min()), int(read[-1].max())]
            fine = least <= keys[0] <= keys[1] <= most
            wrong = "" if fine else f"rows read {keys[0]:,} to {keys[1]:,} keys, not {least:,} to {most:,}"
            return {"keys_in_view": keys}, wrong
        if isinstance(out, Tensor):
            judged, wanted = out[:, :2].tolist(), [(gamma + 1) // 2 + 1, gamma]
            return {}, "" if judged == [wanted] * n else f"tokens emitted and judged are {judged}, not {wanted} each"
        changed = int((lists != held).any(-1).any(-1).any(0).sum()) if lists is not None else n
        return {}, "" if changed == n else f"{changed} of {n} rows have selected"

    @property
    def view(self) -> Any:
        """The view that drafts are read through: it owns what a selection has chosen."""
        return getattr(self.engine.policy, "view", None)

    def save_state(self) -> None:
        """Save the state of rows in the middle of decoding, from which every timed call starts."""
        engine, policy, state = self.engine, self.engine.policy, self.engine.state
        assert policy
        for tensor, value in (state.seq_len, self.context), (state.active, True), (state.stop_on_eos, False):
            tensor.fill_(value)
        state.remaining.fill_(PLENTY)
        self.kept.rewind()
        for slot, prompt in enumerate(self.prompts):
            policy.host_admit(slot, prompt)
            state.pending[slot] = prompt[-1]
        # a view that lists by a pass of its own has no list before
        engine.schedule.rounds.refresh(RoundPlan.of(dict.fromkeys(range(self.batch), self.context), gamma=self.gamma))
        owners = state, self.kept, self.view
        tensors = {id(x): x for owner in owners for x in vars(owner).values() if torch.is_tensor(x)}
        self._saved = [(x, x.clone()) for x in tensors.values()]
        self.restore_state()

    def restore_state(self) -> None:
        """Restore that state, to keep every other draft; on the device alone, so that it may run between repeats."""
        for tensor, value in self._saved:
            tensor.copy_(value)
        self.kept.table.fill_((self.gamma + 1) // 2)

    def ceilings(self) -> Record:
        dtype, device = self.engine.dtype_name, self.setup.device.type
        system = System(model=self.config, chip=self.setup.chip, dtype=dtype, device=device, room=self.room)
        how: tuple[Any, ...] = self.arm.profile.chances, self.batch, self.context, self.gamma
        one = system.forecast(self.engine.draft, *how)
        return {"target": one.target_seconds, "draft": one.draft_seconds, "verify": one.verify_seconds}


def timed_cell(setup: Setup, context: int, arm: Arm) -> Record:
    """One draft over rows of one length: its steps, then plain and replayed rounds in turns, A B B A."""
    try:
        require_precision(arm.quantize, setup.device, torch.bfloat16 if setup.on_cuda else torch.float32, of_draft=True)
        cell = cell_for(context, setup.memory, *([arm] if arm.quantize else []))
    except ValueError as error:  # a card too small for it is no failure
        return {"arm": arm.name, "quantize": arm.quantize, "skipped": str(error)}
    gamma = min(planned(setup.chip, cell, arm).gamma, 2 if setup.tiny else MOST_DRAFTED)
    began = time.perf_counter()
    bench = Bench(setup, cell, arm, gamma)
    built = time.perf_counter() - began
    steps = bench.steps()
    for speculate in (True, False):  # captures
        bench.run(speculate, 2)
    runs = in_turns((False, True), lambda way, _: bench.run(way, bench.rounds), lambda turn: turn < setup.pairs)
    ratios = [s["per_second"] / p["per_second"] for s, p in zip(runs[True], runs[False], strict=True)]
    speeds = {how: statistics.median(run["per_second"] for run in those) for how, those in runs.items()}
    model = {"ideal": IDEAL, "practical": PRACTICAL, "expected": EXPECTED}
    return {
        "cell": cell.name, "planned_batch": cell.batch, "arm": arm.name, "policy": arm.policy, "budget": bench.budget,
        "quantize": arm.quantize, "gamma": gamma, "batch": bench.batch, "context": bench.context,
        "chip": asdict(setup.chip), "build_seconds": built, "steps": steps, "roofline": bench.ceilings(),
        "replayed": True, "ratio": spread(ratios), "pairs": setup.pairs, "rounds_of_a_run": bench.rounds,
        "plain_tokens_per_second": speeds[False], "replayed_tokens_per_second": speeds[True],
        "tokens_per_round": runs[True][0]["per_round"],
        "predicted": {name: predict(setup.chip, cell, arm, gamma, e).ratio for name, e in model.items()},
        "just_after": clocks() if setup.on_cuda else {},
    }  # fmt: skip
