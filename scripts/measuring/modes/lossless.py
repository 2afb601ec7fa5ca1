"""Every policy beside plain decoding, token for token, and how close a call it was where they part."""

from __future__ import annotations

from tqdm import tqdm

from gpt_fast_sd.engine import Engine
from gpt_fast_sd.loading import locate
from gpt_fast_sd.model import load_model
from gpt_fast_sd.policies.config import DraftConfig
from measuring import lossless, prompts
from measuring.grid import Point, has_a_model
from measuring.ledger import digest, fingerprint
from measuring.modes.mode import Job, Mode, NothingMeasured, OutputsDiffer, Record
from measuring.points import POLICIES, difference_text
from measuring.turns import Run, run

LOOKING = 60.0  # seconds after which no more gaps of a policy's differences are computed


class Lossless(Mode):
    """Every policy compared with plain decoding, token for token, on prompts of ragged length."""

    def __init__(self, job: Job) -> None:
        args = job.args
        (batch,), (budget,), (gamma,) = args.batch, args.budget, args.gamma
        if not 2 <= args.shortest <= args.longest:
            raise ValueError(
                f"prompts of {args.shortest:,} to {args.longest:,} tokens: the shortest has at least 2, the longest "
                "at least as many"
            )
        if args.temperature != [0.0]:
            raise ValueError("--lossless compares greedy outputs: samples differ by design, leave --temperature out")
        if job.parallel.tp > 1:
            raise ValueError("--lossless runs in one process; of several the sweep compares")
        self.prompts = prompts.ragged(job.texts, args.prompts, args.shortest, args.longest, job.bos, args.seed)
        self.engine: Engine | None = job.build(batch, args.longest, None)  # which the first points take
        self.theirs = ""
        if any(has_a_model(setting.policy) for setting in job.settings):
            self.theirs = fingerprint(load_model(locate(args.draft_model), dtype=self.engine.dtype))
        settings = job.in_common(
            weights=fingerprint(self.engine.model), dtype=self.engine.dtype_name, compiled=self.engine.compiled,
            threads=args.threads, texts={name: digest(ids) for name, ids in job.texts.items()}, prompts=args.prompts,
            shortest=args.shortest, longest=args.longest, new_tokens=args.max_new_tokens, batch_size=batch,
            budget=budget, gamma=gamma, seed=args.seed,
        )  # fmt: skip
        super().__init__(job, job.points([args.longest]), job.ledger("speculation lossless", settings), POLICIES)

    def key(self, point: Point) -> Record:
        """Policy and budget, and the draft model where there is one."""
        key: Record = {"policy": point.setting.policy, "budget": point.setting.budget}
        if point.needs_model:
            key |= {"draft_model": self.job.args.draft_model, "draft_weights": self.theirs}
        return key

    def build(self, batch: int, context: int, draft: DraftConfig | None) -> Engine:
        """An engine; the first one that asks for no draft model has the one that is there."""
        engine, self.engine = (self.engine, None) if draft is None else (None, self.engine)
        return engine or super().build(batch, context, draft)

    def decode(self, engine: Engine, what: str, *, speculate: bool) -> Run:
        """All prompts, with a progress bar."""
        params = self.job.params(len(self.prompts), 0.0)
        with tqdm(total=len(params), desc=what, unit="prompt", leave=False) as bar:
            return run(engine, self.prompts, params, speculate=speculate, finished=lambda _: bar.update())

    def measure(self, point: Point, engine: Engine) -> Record:
        """Where a policy's outputs leave the plain ones, and how close a call it was."""
        plain = self.ledger.find({"policy": "off"})
        if plain is None:
            plain = {"policy": "off", "outputs": self.decode(engine, "plain", speculate=False).outputs}
            self.ledger.put({"policy": "off"}, plain)
        one = self.decode(engine, point.setting.label, speculate=True)
        found = lossless.differences(
            zip(range(len(self.prompts)), self.prompts, plain["outputs"], one.outputs, strict=True),
            lambda ids: lossless.logits_after(engine.model, ids), LOOKING,
        )  # fmt: skip
        return {
            "prompts": len(self.prompts),
            "equal": len(self.prompts) - len(found),
            "differences": [
                {"row": d.index, "position": d.position, "plain": d.plain, "speculative": d.speculative, "gap": d.gap,
                 "best": d.best}
                for d in found
            ],
            "acceptance_rate": one.stats.acceptance_rate,
            "acceptance_by_position": one.stats.acceptance_by_position,
            "tokens_per_round": one.stats.tokens_per_round,
            "recompiles": one.stats.recompiles,
        }  # fmt: skip

    def line(self, record: Record) -> str:
        """A row of the table, and a line for each difference."""
        return "\n".join([self.table.line(record), *map(difference_text, record["differences"])])

    def report(self, found: list[Record]) -> None:
        """Which policies are not lossless."""
        if not found:
            raise NothingMeasured("no policy could be built; the reasons are above")
        print("", self.table.head, *map(self.line, found), sep="\n")
        engine = self.ledger.document["settings"]
        dtypes = engine["dtype"], engine["kv_dtype"] or engine["dtype"]
        must = engine["exact"] or dtypes == ("fp32", "fp32")

        def is_wrong(one: Record) -> bool:
            if must or one["gap"] is None:
                return must
            return not lossless.is_near_tie(one["gap"], *dtypes, best=one.get("best", 0.0))

        if wrong := [r["policy"] for r in found if any(map(is_wrong, r["differences"]))]:
            raise OutputsDiffer(f"not token-identical to plain decoding: {', '.join(wrong)}")
