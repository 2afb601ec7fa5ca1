"""Make a file of prompts, for generate.py and batch.py, of what others publish or of RULER's tasks.

    python scripts/make_prompts.py longbench/qasper.jsonl infinitebench.jsonl speed_bench_8k.parquet prompts.jsonl
    python scripts/make_prompts.py hf:nvidia/SPEED-Bench:throughput_8k:test prompts.jsonl --count 100
    python scripts/make_prompts.py pg19.parquet prompts.jsonl --skip 8000 --tokens 8000 --model MODEL
    python scripts/make_prompts.py ruler:cwe ruler:vt prompts.jsonl --tokens 8000 --count 20 --model MODEL
    python scripts/make_prompts.py --score out.jsonl         how many of RULER's answers batch.py's output holds

A source is a file, a dataset of the hub (hf:OWNER/NAME[:CONFIG][:SPLIT]) or a task (ruler:NAME, ruler:NAME=FILE). A
file whose rows are texts, as PG-19's are, is cut into stretches of --tokens, one after another, once --skip tokens of
each text are left out. The id of a line says where it comes from, and of a task which answers are right.
"""

from __future__ import annotations

import gpt_fast_sd  # noqa: F401  before torch is loaded, see there

# isort: split
import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean

from common import parser_of, refusing, started
from files import check_files
from flags import FIELDS, count, names, positive, seed, sizes
from gpt_fast_sd import SamplingParams
from gpt_fast_sd.loading import BUNDLED, locate
from gpt_fast_sd.model import Tokenizer, read_config
from inputs.prompts import reader_of
from inputs.rows import holds_prompts, texts_of
from inputs.ruler import RULER, TASKS, Task
from inputs.sources import Record, lines_of, prompts_of
from measuring.ledger import write_whole
from records import checked, naming, wanted

PROGRAM = "make_prompts.py"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; argparse itself refuses unknown flags, ValueError those that do not fit each other."""
    parser = parser_of(PROGRAM, __doc__)
    add = parser.add_argument
    add("files", metavar="SOURCE", type=Path, nargs="*", help="what is read; the last one is written, OUT.jsonl")
    add("--tokens", metavar="S", type=sizes, help="of a stretch of a text, or of a sample of a task at most")
    add("--count", metavar="N", type=positive, help="prompts of a source (default: all; 1 of a task)")
    add("--skip", metavar="N", type=count, default=0, help="first tokens of each text that are left out (default: 0)")
    add("--seed", metavar="N", type=seed, default=0, help="of a task's first sample (default: 0)")
    add("--fields", metavar="A,B", type=names, default=[], help=FIELDS)
    add("--model", metavar="M", default="bundled", help="whose tokens are counted (default: bundled)")
    add("--score", metavar="OUT.jsonl", type=Path, help="of batch.py; nothing is made")
    args = parser.parse_args(argv)
    if args.score is None and len(args.files) < 2:
        raise ValueError("a source and a file to write are needed, as in: make_prompts.py ruler:vt prompts.jsonl")
    if args.tokens is not None and len(args.tokens) > 1:
        raise ValueError(f"prompts have one --tokens, got {len(args.tokens)}")
    if args.tokens and args.tokens[0] < 2:
        raise ValueError(f"--tokens must be at least 2, got {args.tokens[0]}")
    return args


def made(source: Path, args: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[Record]:
    """The prompts of a source, with an id each."""
    tokens = args.tokens[0] if args.tokens else None
    if str(source).startswith(RULER):
        if tokens is None:
            raise ValueError(f"{source} is made to a length: give --tokens")
        task = Task.of(str(source), BUNDLED / "document.txt")
        for seed in range(args.seed, args.seed + (args.count or 1)):
            sample = task.sample(tokens, lambda text: len(tokenizer.encode(text)), seed)
            yield {"id": {"task": task.name, "seed": seed, "answers": sample.answers}, "prompt": sample.prompt}
    elif holds_prompts(source, args.fields):
        for where, record in prompts_of(source, args.fields, args.count):
            with naming(where):
                wanted(record, SamplingParams())
            yield {"id": where} | checked(record, where)
    else:
        if tokens is None:
            raise ValueError(f"{source} holds texts: give --tokens, the length of a stretch")
        first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        body = tokens - len(first)
        for name, ids in texts_of([source], tokenizer, args.skip).items():
            for start in range(0, len(ids) - body + 1, body):
                yield {"id": f"{name} from {args.skip + start}", "tokens": [*first, *ids[start : start + body]]}


def written(one: Record) -> str:
    """A prompt as a line; ValueError where a column of its row holds what JSON cannot."""
    try:
        return json.dumps(one, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{one['id']}: {error}: say with --fields what to read") from None


def scores(path: Path) -> dict[str, list[float]]:
    """The share of its answers that each completion of a task holds, whatever their case, by task."""
    found = defaultdict[str, list[float]](list)
    for where, row in lines_of(path):
        of = row.get("id") if isinstance(row, dict) else None
        answers = of.get("answers") if isinstance(of, dict) and of.get("task") in TASKS else None
        texts = [*answers, row.get("text")] if isinstance(answers, list) and answers else [None]
        found_texts = [one.lower() for one in texts if isinstance(one, str)]
        if not isinstance(of, dict) or len(found_texts) < len(texts):
            raise ValueError(f"{where} has no text, or no answers of a task in its id, as {PROGRAM} writes it")
        *wanted, text = found_texts
        hits = [answer in text for answer in wanted]
        # of several answers to one question any will do, of several that are asked for all
        found[of["task"]].append(float(any(hits)) if of["task"] == "qa" else fmean(hits))
    if not found:
        raise ValueError(f"{path} is empty")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, read, write."""
    with refusing(PROGRAM):
        args = parse(argv)
        if args.score is not None:
            for task, each in scores(args.score).items():
                print(f"{task:<16}{fmean(each):7.1%} of {len(each):,}")
            return
        *sources, out = args.files
        check_files({"the output": out}, {"a source": [source for source in sources if source.exists()]})
        folder = locate(args.model)
        tokenizer = reader_of(args.model, folder, read_config(folder))
        most = args.count and min(args.count, sys.maxsize)
        lines = [written(one) for source in sources for one in islice(made(source, args, tokenizer), most)]
        if not lines:
            raise ValueError(f"there is no stretch of {args.tokens[0]:,} tokens")
        write_whole(out, "".join(f"{line}\n" for line in lines))
    print(f"{len(lines):,} prompts in {out}")


if __name__ == "__main__":
    started(main)
