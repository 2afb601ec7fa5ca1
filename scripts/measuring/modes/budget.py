"""Every policy over the draft budget, at one batch and context."""

from __future__ import annotations

from dataclasses import asdict

from gpt_fast_sd.engine import Engine
from gpt_fast_sd.fast.compile import can_compile
from measuring import plots, prompts
from measuring.grid import Point
from measuring.ledger import digest
from measuring.modes.mode import Job, Mode, NothingMeasured, Record, describe
from measuring.points import BUDGETS
from measuring.turns import Run, Turns, round_ms, run, spread, take_turns, totals


class ByBudget(Mode):
    """Acceptance, tokens per round and speed over the draft budget, at one batch and context."""

    def __init__(self, job: Job) -> None:
        args = job.args
        if args.context and len(args.context) > 1:
            raise ValueError(f"--sweep budget measures with one --context, got {len(args.context)}")
        (batch,), room = args.batch, job.config.n_positions - args.max_new_tokens
        share = -(-batch // len(job.texts))  # rows of a text
        context = (args.context or [prompts.longest_context(min(map(len, job.texts.values())), share, room)])[0]
        if not 2 <= context <= room:
            raise ValueError(
                f"a context of {context:,} does not fit: from 2 to {max(room, 0):,} tokens leave the model's "
                f"{room + args.max_new_tokens:,} positions room for {args.max_new_tokens:,} new ones"
            )
        self.prompts = prompts.stretches(job.texts, batch, context, job.bos)
        self.plain: Run | None = None
        settings = job.in_common(
            batch_size=batch, gamma=args.gamma[0], new_tokens=args.max_new_tokens, pairs=args.pairs,
            temperature=args.temperature[0], seed=args.seed, draft_model=args.draft_model, text=", ".join(job.texts),
            digest=digest(self.prompts), context=context, dtype=job.dtype_name,
            compiled=not args.no_compile and can_compile(job.parallel.device), **job.timed,
        )  # fmt: skip
        super().__init__(job, job.points([context]), job.ledger("frontier", settings), BUDGETS)

    def key(self, point: Point) -> Record:
        """Policy and budget: all else is in the settings."""
        return {"policy": point.setting.policy, "budget": point.setting.budget}

    def measure(self, point: Point, engine: Engine) -> Record:
        """One point of the frontier; where nothing is timed, ratio and milliseconds are None."""
        params, n = self.job.params(point.batch, point.temperature), self.job.args.pairs
        if n:
            turns = take_turns(engine, self.prompts, params, n, seconds=self.job.args.seconds, progress=self.step)
        else:  # how they are decoded plainly is the same for all points
            self.plain = self.plain or run(engine, self.prompts, params, speculate=False)
            turns = Turns([self.plain], [run(engine, self.prompts, params)])
        counts = turns.counts
        return {
            "acceptance_rate": counts.acceptance_rate,
            "acceptance_by_position": counts.acceptance_by_position,
            "tokens_per_round": counts.tokens_per_round,
            "distinct_4grams": turns.distinct_4grams,
            "ratio": spread(turns.ratios()) if n else None,
            "plain_ms": round_ms(turns.plain) if n else None,
            "speculative_ms": round_ms(turns.speculative) if n else None,
            "kv_bytes_per_token": {
                "plain": totals(turns.plain).kv_bytes_per_token, "speculative": counts.kv_bytes_per_token,
            },
        }  # fmt: skip

    def report(self, found: list[Record]) -> None:
        """What was not timed, and the picture."""
        args = self.job.args
        if not found:
            raise NothingMeasured("no policy could be measured; the reasons are above")
        if not args.pairs:
            print("no pairs: each point was decoded once to count acceptance, and nothing was timed")
        else:
            self.warn_of_speeds()
        self.ledger.write(transformer=asdict(self.job.config), skipped=self.job.skipped)
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            plots.draw_budgets(found, describe(self.ledger.document), args.plots / "budgets.png")
            print(f"drawn: {args.plots / 'budgets.png'}")
