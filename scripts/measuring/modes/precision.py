"""The points of a sweep, each at several precisions: what quantizing cache, drafts and target gains."""

from __future__ import annotations

from gpt_fast_sd.engine import Engine
from gpt_fast_sd.loading import TORCH_DTYPES, System, check_kv_dtype, locate, plan_for
from gpt_fast_sd.model import read_stored_float8
from measuring import machine, plots, precisions, prompts
from measuring.grid import Point, draft_fields, draft_label, has_a_model
from measuring.modes.mode import Job, Record, describe
from measuring.modes.size import BySize
from measuring.precisions import PRECISIONS, Precision


class ByPrecision(BySize):
    """The points of a sweep, each at several precisions of cache and weights."""

    benchmark, rows_of = "precision", PRECISIONS

    def __init__(self, job: Job) -> None:
        args = job.args
        for name in ("kv_dtype", "quantize", "draft_quantize"):
            if getattr(args, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is what --precisions varies: name it there")
        if any(has_a_model(setting.policy) for setting in job.settings):
            raise ValueError("--sweep precision is about targets that draft for themselves: leave the draft model out")
        if job.parallel.device.type == "cuda" and read_stored_float8(locate(args.model)):
            raise ValueError(f"{args.model} is stored in float8, and --sweep precision begins with nothing quantized")
        self.precisions = list(dict.fromkeys(map(Precision.parse, args.precisions)))
        device, dtype = job.parallel.device, TORCH_DTYPES[job.dtype_name]
        for one in self.precisions:  # refused before any work
            config = one.engine(job.engine_config)
            check_kv_dtype(config, dtype, device)
            for setting in job.settings:
                draft = one.draft(setting.draft(args.gamma[0], draft_fields(vars(args))))
                if draft.needs_planes:
                    raise ValueError(f"--sweep precision measures caches in bytes, and {draft.policy} reads planes")
                system = System(config=config, draft=draft, model=job.config, dtype=dtype, device=device)
                plan_for(system.of_rank(job.parallel))
        super().__init__(job, precisions=[one.text for one in self.precisions])
        self.engines: dict[Precision, Engine] = {}  # beside the one that is measured, and for the same rows

    def engine(self, base: Engine, precision: Precision) -> Engine:
        """The engine of a target of this precision; those of an earlier base are dropped."""
        if self.engines.get(Precision()) is not base:
            self.engines = {Precision(): base}
            machine.release_memory(base.device)
        if precision not in self.engines:
            self.step(f"{precision.text}: loading and compiling")
            config, parallel = precision.engine(base.config), base.parallel
            if precision.weights is None:  # the weights are the same
                found = Engine(base.model, base.tokenizer, config, parallel=parallel)
            else:
                found = Engine.from_pretrained(self.job.args.model, config, parallel=parallel)
            self.engines[precision] = found
        return self.engines[precision]

    def measure(self, point: Point, engine: Engine) -> Record:
        """One point's figures at every precision."""
        rows = prompts.round_the_text(self.ids, point.batch, point.context, self.job.bos)
        note = self.note(point.batch, point.context)
        name = f"{point.batch} x {point.context:,}, {draft_label(point.key)}"
        found = precisions.take_turns(
            lambda one: self.engine(engine, one), self.precisions, self.job.draft(point), rows,
            self.job.params(point.batch, point.temperature), self.job.args.pairs,
            progress=lambda what: self.step(f"{name}, {what}"),
        )  # fmt: skip
        rates = self.system(engine).chip
        return {
            "status": "measured", "dtype": engine.dtype_name, "precisions": found, "note": note,
            "machine": {"bandwidth": rates.bandwidth, "peak": rates.peak}, "load_average": machine.load_average(),
        }  # fmt: skip

    def done(self, point: Point, found: Record | Exception) -> None:
        """Store and print the figures, or why there are none; they replace older ones."""
        if isinstance(found, Exception):
            found = {"status": "failed", "reason": self.job.told(found)}
        self.ledger.put(point.key, point.key | found)
        self.ledger.write()
        self.bar.write(self.line(self.ledger.find(point.key) or {}))

    def line(self, record: Record) -> str:
        """The rows of the table, or why there are none."""
        if record["status"] == "measured":
            return "\n".join(self.table.line(row) for row in precisions.flat(record))
        return super().line(record)

    def report(self, found: list[Record]) -> None:
        """All points in one table, and a picture."""
        args, measured = self.job.args, self.listed(found)
        self.warn_of_speeds()
        if args.plots:
            args.plots.mkdir(parents=True, exist_ok=True)
            plots.draw_precisions(measured, describe(self.ledger.document), args.plots / "precisions.png")
            print(f"drawn: {args.plots / 'precisions.png'}")
