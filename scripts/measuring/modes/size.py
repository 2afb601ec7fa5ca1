"""Speculation over batch and context: what each point gains, and from which lengths on."""

from __future__ import annotations

from dataclasses import asdict

from gpt_fast_sd.engine import Engine
from gpt_fast_sd.loading import locate
from gpt_fast_sd.model import read_config
from measuring import machine, plots, prompts
from measuring.chips import Chip, Ranks, chip_of
from measuring.forecast import System
from measuring.grid import Point, draft_label
from measuring.ledger import digest
from measuring.lengths import lengths_of, lines_of
from measuring.modes.mode import Job, Mode, NothingMeasured, OutputsDiffer, Record, describe
from measuring.points import SIZES, more, rates_of, summarize
from measuring.turns import take_turns

MOST_RANDOM = 1 << 24  # tokens of --synthetic, which longer rows go round


class BySize(Mode):
    """A sweep over batch, context, draft, budget, gamma and temperature."""

    benchmark, rows_of = "batch", SIZES

    def __init__(self, job: Job, **settings: object) -> None:
        args = job.args
        if args.context[0] < 2:
            raise ValueError(f"a context has at least 2 tokens, got {args.context[0]}")
        if args.synthetic:
            n = min(max(args.batch) * max(args.context), MOST_RANDOM)
            self.ids = prompts.random_text(n, job.config.vocab_size, args.seed)
            text: Record = {"synthetic": args.seed}
        else:
            self.ids = [token for ids in job.texts.values() for token in ids]
            text = {"files": list(job.texts), "tokens": len(self.ids), "digest": digest(self.ids)}
        names = ("draft_model", "max_new_tokens", "pairs", "seed", "dtype")
        draft_config = read_config(locate(args.draft_model)) if args.draft_model else None
        settings = job.in_common(
            transformer=asdict(job.config), text=text, compiled=not args.no_compile,
            draft_transformer=asdict(draft_config) if draft_config else None,
            **{name: getattr(args, name) for name in names}, **job.timed, **settings,
        )  # fmt: skip
        ledger = job.ledger(self.benchmark, settings, "points")
        super().__init__(job, job.points(args.context), ledger, self.rows_of)
        self.draft_config, self.chip = draft_config, None

    chip: Chip | None  # the machine's rates, once they are measured

    def note(self, batch: int, context: int) -> str | None:
        """What is to be said of a point's prompts, which are not made before an engine has room for them."""
        return prompts.remark_on(len(self.ids), batch, context, self.job.bos)

    def known(self, point: Point) -> Record | None:
        """The figures that the file holds: what failed is tried again."""
        found = super().known(point)
        return found if found and found["status"] == "measured" else None

    def run(self) -> list[Record]:
        """As every mode, after the notes about the prompts."""
        for note in dict.fromkeys(self.note(b, c) for b in self.job.args.batch for c in self.job.args.context):
            if note:
                self.job.parallel.log(note)
        super().run()
        return [record for point in self.points if (record := self.ledger.find(point.key))]

    def system(self, engine: Engine) -> System:
        """The model on this machine, whose rates are measured once."""
        self.chip = self.chip or rates_of(engine.device, engine.dtype)
        job, args = self.job, self.job.args
        link = (chip_of(self.chip.name) or self.chip).link
        return System(
            model=job.config, chip=self.chip, device=engine.device.type, dtype=engine.dtype_name,
            kv_dtype=args.kv_dtype, quantize=args.quantize, draft_model=self.draft_config, room=args.max_new_tokens,
            ranks=Ranks(n=job.parallel.tp, link=link, per_node=job.parallel.tp) if job.parallel.tp > 1 else None,
        )  # fmt: skip

    def measure(self, point: Point, engine: Engine) -> Record:
        """One point's figures."""
        rows = prompts.round_the_text(self.ids, point.batch, point.context, self.job.bos)
        note, system = self.note(point.batch, point.context), self.system(engine)
        name = f"{point.batch} x {point.context:,}, {draft_label(point.key)}"
        machine.restart_peak(engine.device)
        turns = take_turns(
            engine, rows, self.job.params(point.batch, point.temperature), self.job.args.pairs,
            seconds=self.job.args.seconds, progress=lambda what: self.step(f"{name}: {what}"),
        )  # fmt: skip
        rates = {"bandwidth": system.chip.bandwidth, "peak": system.chip.peak}
        return summarize(point, turns, engine, system, self.job.draft(point)) | {"note": note, "machine": rates}

    def done(self, point: Point, found: Record | Exception) -> None:
        """Store and print the figures, or why there are none; they replace older ones."""
        if isinstance(found, Exception):
            found = {"status": "failed", "reason": self.job.told(found)}
        self.ledger.put(point.key, point.key | found)
        self.ledger.write(lengths=lengths_of([r for r in self.ledger.records if r["status"] == "measured"]))
        self.bar.write(self.line(self.ledger.find(point.key) or {}))
        if found["status"] == "measured":
            self.bar.write(more(found))

    def line(self, record: Record) -> str:
        """A row of the table, or why there is none."""
        if record["status"] == "measured":
            return self.table.line(record)
        return f"{record['context']:>7,}  {record['batch']:>5}  {draft_label(record):<34}  skipped: {record['reason']}"

    def listed(self, found: list[Record]) -> list[Record]:
        """Print all points in one table -> those that were measured; NothingMeasured where there is none."""
        print("", self.table.head, *map(self.line, found), sep="\n")
        if measured := [r for r in found if r["status"] == "measured"]:
            return measured
        raise NothingMeasured("nothing could be measured; the reasons are above")

    def report(self, found: list[Record]) -> None:
        """All points in one table, the lengths, the pictures."""
        args = self.job.args
        found.sort(key=lambda r: (draft_label(r), r["context"], r["batch"]))
        measured = self.listed(found)
        rates = measured[-1]["machine"]
        print(f"the machine reads {rates['bandwidth'] / 1e9:,.1f} GB/s and computes {rates['peak'] / 1e9:,.0f} GFLOP/s")
        capturing = sum(r.get("capture_seconds", 0.0) for r in measured)  # files of before it was told have none
        if capturing:
            print(f"capturing rounds as CUDA graphs took {capturing:.1f} s, which are in no speed above")
        lengths = lengths_of(measured)
        print(*lines_of(lengths), sep="\n")
        self.warn_of_speeds()
        if args.plots:
            for path in plots.draw_sweep(measured, lengths, describe(self.ledger.document), args.plots):
                print(f"drawn: {path}")
        compared = [r["lossless"] for r in measured if r["lossless"]["compared"]]
        rows, equal = sum(one["rows"] for one in compared), sum(one["equal"] for one in compared)
        if not compared:
            print("outputs are sampled and not compared: samples differ by design")
            return
        print(f"{equal} of {rows} rows equal plain decoding, token for token")
        must = args.exact or (measured[-1]["dtype"], measured[-1]["kv_dtype"]) == ("fp32", "fp32")
        if equal < rows and must:
            raise OutputsDiffer(f"{rows - equal} rows differ where they must not; please report it")
