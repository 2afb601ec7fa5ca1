"""Time plain decoding of one model here, in transformers, llama.cpp and gpt-fast: same weights, prompt, dtype, threads.

    python scripts/peers.py                                   # the bundled model, everything that is installed
    python scripts/peers.py --model FOLDER --contexts 512,8192 --batches 1,8 --json peers.json   # or FILE.gguf
    python scripts/peers.py --model smollm2 --contexts 512,4000 --llama-bin FOLDER --json speculation.json

What is compared, and why it is fair:
* Decoding only. One row is prefilled, timed apart, and its keys and values are *copied* into the others, so that a step
  reads all rows. For llama.cpp that takes one stream per sequence (kv_unified=False: else cells would be shared, and a
  step would read 1/B of the bytes); the size of the KV buffer that it reports is checked against B full rows.
* Every peer runs in a process of its own, with the same number of threads, and they take turns, A B C A B C: a block of
  steps each, its first step untimed (caches and thread pools wake up). The others wait on a pipe meanwhile.
* Every mode of a peer is timed and the fastest counts (marked *). Each holds a model and all rows of its own at the
  same time: --without leaves out what memory cannot hold.
* A GGUF file is dequantized to 16 bits once, for all peers alike. llama.cpp is timed on the file as it comes, too, as a
  peer of its own: it then reads fewer bytes per weight, which its ceiling takes into account, and computes in 8 bits.
* The ceiling is the time to read the weights and the context's keys and values once, at the read bandwidth that this
  machine shows in this run. Cells that fit into a CPU cache can pass 100 %.
* Greedy tokens are compared with transformers in fp32: every peer in fp32 (they must agree), and every timed cell in
  its own dtype (where rounding may decide between near-equal logits: the gap there is shown).

--llama-bin FOLDER, of llama.cpp's programs, times speculation instead, one row of a GGUF file: our int4 drafts and our
n-gram lookup beside llama.cpp's lookups and its draft model (the file as it comes, or in Q4_0, for its weights in F16)
and transformers' prompt lookup.
Each mode runs alone first, twice: ours with 1 to 6 drafts, llama.cpp's with several. The best of each peer and plain
decoding then take turns, a run of --new-tokens each, on a prompt whose keys are there. Time is that of the rounds, as
the engine counts it, or llama.cpp's server. Drafts and tokens a round are over all rounds, also those without drafts.

--json FILE is whole after every cell. Started again with the same settings it goes on where it ended; contexts and
batches may be added. Other settings are refused; --fresh begins anew.

Shapes: B batch rows, S tokens a row holds, V vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from common import refuse, refusing, started
from files import check_files, path_of
from flags import MODELS, count, given_beside, names_of, positive, sizes, threads
from gpt_fast_sd.loading import BUNDLED, locate
from gpt_fast_sd.model import ModelConfig, gguf_parts, load_model, read_config, save_hugging_face
from maintain.gguf_writer import export_gguf
from measuring import peer_turns
from measuring.ledger import Ledger
from measuring.machine import environment
from measuring.peer_speculation import LLAMA_WEIGHTS, SMALLER, TURNS, Contest, find_program
from measuring.peer_turns import CELL, WARMUP_STEPS, cell_report, prompt_tokens, read_bandwidth, weight_bytes
from measuring.peers import AS_IT_COMES, Setup, one_line

PROGRAM = "peers.py"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked as far as it can be without the model."""
    about = "Time plain decoding in this engine, transformers and llama.cpp."
    parser = argparse.ArgumentParser(prog=PROGRAM, description=about)
    add = parser.add_argument
    add("--model", default="bundled", help=f"{MODELS} (default: bundled)")
    document = BUNDLED / "document.txt"
    add("--text", type=Path, default=document, help="of the prompt, repeated or cut (default: the bundled document)")
    add("--contexts", type=sizes, default=[512, 8192, 16000], help="tokens in the cache (default: 512,8192,16000)")
    add("--llama-bin", type=Path, metavar="FOLDER", help="of llama.cpp's programs: time speculation, one row")
    add("--new-tokens", type=positive, default=128, help="of a run, with --llama-bin (default: 128)")
    add("--batches", type=sizes, default=[1, 8], help="rows (default: 1,8)")
    peers = list(peer_turns.INSTALL)
    add("--peers", type=names_of("peer", peers), default=peers, help=f"among {','.join(peers)} (default: all)")
    add("--without", metavar="MODE", nargs="+", default=[], help="not timed, as the table names them")
    add("--steps", type=positive, default=16, help="timed steps of a block (default: 16)")
    add("--repeats", type=positive, default=5, help="blocks each peer gets, in turns (default: 5)")
    add("--threads", type=threads, default=torch.get_num_threads(), help="of every peer (default: %(default)s)")
    add("--agree", type=count, default=16, help="greedy tokens compared with fp32 (default: 16; 0: none)")
    add("--json", metavar="FILE", help="keep one JSON document here, go on from it; - prints it as the last line")
    add("--fresh", action="store_true", help="forget what --json holds")
    args = parser.parse_args(argv)
    unread = {"new_tokens"} if args.llama_bin is None else {"batches", "peers", "steps", "agree"}
    if idle := given_beside(parser, args, *(set(vars(args)) - unread)):
        parser.error(f"{idle[0]} does nothing {'without' if args.llama_bin is None else 'with'} --llama-bin")
    return args


def in_16_bits(source: Path, ggufs: Path) -> Path:
    """A folder with a GGUF file's weights in bf16, which every peer reads; the file as it comes stays beside it."""
    folder = ggufs / source.stem
    save_hugging_face(load_model(source, dtype=torch.bfloat16), folder, dtype=torch.bfloat16)
    (ggufs / f"{AS_IT_COMES}.gguf").symlink_to(source.resolve())
    return folder


def opened(args: argparse.Namespace, what: str, source: Path, config: ModelConfig, **settings: Any) -> Ledger:
    """The file of --json, with what its results have in common, for peers of so many threads."""
    settings |= {
        "model": source.name, "transformer": asdict(config), "text": args.text.name, "threads": args.threads,
        "repeats": args.repeats, "without": sorted(args.without),
    }  # fmt: skip
    torch.set_num_threads(args.threads)
    here = environment(torch.device("cpu"), "torch", "transformers", "llama-cpp-python", "gguf")
    return Ledger(path_of(args.json), what, settings, here, fresh=args.fresh, results="cells")


def speculation(args: argparse.Namespace, source: Path, config: ModelConfig, ggufs: Path) -> dict[str, Any]:
    """Time speculation beside llama.cpp's, printing as it goes, and return the report; ValueError as below."""
    program, version = find_program(args.llama_bin)
    if source.suffix.lower() != ".gguf":
        raise ValueError("--llama-bin needs a GGUF file as --model: as it comes, it is llama.cpp's draft model")
    most = config.max_seq_len - args.new_tokens - 1
    if most < 2:
        raise ValueError(f"--new-tokens must be at most {config.max_seq_len - 3}, got {args.new_tokens}")
    if not 2 <= args.contexts[0] <= args.contexts[-1] <= most:
        raise ValueError(f"contexts must be from 2 to {most} tokens, as --new-tokens need room, got {args.contexts}")
    ledger = opened(args, "peers' speculation", source, config, new_tokens=args.new_tokens)
    setup = Setup(folder=in_16_bits(source, ggufs).resolve(), config=config, ggufs=ggufs, threads=args.threads)
    for name in (LLAMA_WEIGHTS, SMALLER):
        export_gguf(setup.folder, ggufs / f"{name}.gguf", name.lower(), tokenizer_of=source)
    contest = Contest(setup, program, args.without, new_tokens=args.new_tokens, repeats=args.repeats)
    contest.failures += ledger.document.get("failures", [])
    prompt = prompt_tokens(source, config, args.text, args.contexts[-1])
    print(f"{args.threads} threads; {program.name}: {version}")
    for context in args.contexts:
        if ledger.find({"context": context}):
            print(f"context {context} is in {args.json} already")
            continue
        bandwidth = read_bandwidth()
        n_bytes = weight_bytes(config) + (context + args.new_tokens // 2) * config.kv_bytes_per_token(2)
        ceiling = bandwidth * 1e9 / n_bytes
        print(f"context {context}: {n_bytes / 1e6:.0f} MB a pass at {bandwidth:.1f} GB/s, {ceiling:.0f} plain tokens/s")
        cell = contest.cell(prompt[:context])
        print(*TURNS.lines(cell["results"]), sep="\n", flush=True)
        read = {"read_gb_per_second": bandwidth, "plain_roofline_tokens_per_second": ceiling}
        ledger.put({"context": context}, {"context": context, **read, **cell})
        ledger.write(notes={program.name: version}, failures=contest.failures)
    return ledger.document


def benchmark(args: argparse.Namespace, source: Path, config: ModelConfig, ggufs: Path) -> dict[str, Any]:
    """Run everything, printing as it goes, and return the report; ValueError for input that makes no sense."""
    if args.contexts[0] < 2:
        raise ValueError(f"a context has at least 2 tokens, got {args.contexts[0]}")
    is_file = source.suffix.lower() == ".gguf"
    peers = [peer for peer in args.peers if is_file or peer != "llama.cpp-file"]
    ledger = opened(args, "peers", source, config, steps=args.steps, warmup=WARMUP_STEPS, peers=peers, agree=args.agree)
    folder = in_16_bits(source, ggufs) if is_file else source
    setup = Setup(folder=folder.resolve(), config=config, ggufs=ggufs, threads=args.threads)
    run = peer_turns.Run(setup, peers, args.without, steps=args.steps, repeats=args.repeats, agree=args.agree)
    run.failures += ledger.document.get("failures", [])
    room = config.max_seq_len - run.decoded
    if max(args.contexts) > room:
        raise ValueError(
            f"context {max(args.contexts)} and {run.decoded} decoded tokens pass the model's {config.max_seq_len} "
            f"positions; use at most {room}, or fewer --steps or --repeats"
        )
    run.prompt = prompt_tokens(source, config, args.text, max(args.contexts))

    bandwidth = read_bandwidth()
    weights, per_token = weight_bytes(config), config.kv_bytes_per_token(2)
    print(f"model {args.model}: {config.n_params / 1e6:.1f} M parameters, {per_token} bytes of KV per token (16 bit)")
    print(f"read bandwidth {bandwidth:.1f} GB/s, {args.threads} threads, 1 GiB")
    in_file = sum(part.stat().st_size for part in gguf_parts(source)) if is_file else 0
    if is_file:
        print(f"the file has {in_file / 1e6:.1f} MB, dequantized to bf16 {weights / 1e6:.1f}")
    needs = {}
    for context in args.contexts:
        for batch in args.batches:
            kv = batch * (context + run.decoded // 2) * per_token  # the cache grows: its mean over the steps
            needs[context, batch] = {
                "read_gb_per_second": bandwidth, "weight_bytes": weights, "kv_bytes": kv,
                "roofline_ms": (weights + kv) / bandwidth / 1e6,
                **({"file_roofline_ms": (in_file + kv) / bandwidth / 1e6} if is_file else {}),
            }  # fmt: skip

    todo = [cell for cell in needs if not ledger.find(dict(zip(("context", "batch"), cell, strict=True)))]
    if len(todo) < len(needs):
        print(f"{len(needs) - len(todo)} of {len(needs)} cells are in {args.json} already")
    if not todo:
        return ledger.document
    rates = ledger.document.get("read_gb_per_second", {"best": bandwidth})  # every cell has its own run's beside it
    extra: dict[str, Any] = {"read_gb_per_second": rates}
    with contextlib.closing(run):
        if any(peer.startswith("llama.cpp") for peer in peers):
            try:
                for name in ("F16", "BF16", "F32"):
                    export_gguf(folder, ggufs / f"{name}.gguf", name.lower())
            except ImportError as error:
                run.skip("llama.cpp", one_line(error))
        run.find_missing()
        for peer, notes in run.notes.items():
            print(f"{peer}: {notes}")
        extra["notes"] = ledger.document.get("notes", {}) | run.notes
        wanted = dict.fromkeys(context for context, _ in todo)
        references = {context: run.reference(context) if args.agree else None for context in wanted}
        shortest = min(args.contexts)
        if reference := references.get(shortest):
            print(f"first {args.agree} greedy tokens in fp32, context {shortest}, the same as transformers (eager):")
            extra["greedy_fp32"] = {"context": shortest, "peers": run.agreement_in_fp32(shortest, reference)}
        for context, batch in todo:
            timings = run.cell(context, batch)
            cell = cell_report(timings, context, batch, needs[context, batch], references[context])
            print(f"context {context}, batch {batch}: roofline {cell['roofline_ms']:.2f} ms")
            print(*CELL.lines(cell["results"]), sep="\n", flush=True)
            ledger.put({"context": context, "batch": batch}, cell)
            ledger.write(**extra)
    again = rates["end"] = read_bandwidth()
    print(f"* the mode that counts for its peer. Read bandwidth at the end: {again:.1f} GB/s", end="")
    print(": the percentages are too high, something else was running at the start" if again > 1.1 * bandwidth else "")
    skipped = [{"peer": p, "reason": r, "install": peer_turns.INSTALL[p]} for p, r in run.skipped.items()]
    ledger.write(**extra, skipped=skipped, failures=run.failures)
    return ledger.document


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # for the peers' processes, as the next one
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if args.llama_bin:
        for ends in (signal.SIGTERM, signal.SIGHUP):  # not before the server is ended
            signal.signal(ends, lambda number, _: sys.exit(128 + number))
    with refusing(PROGRAM):
        if args.fresh and not path_of(args.json):
            raise ValueError("--fresh forgets what the file of --json holds, and there is none")
        check_files({"--json": path_of(args.json)}, {"--text": args.text, "--model": args.model})
        source, run = locate(args.model), speculation if args.llama_bin else benchmark
        with tempfile.TemporaryDirectory() as ggufs:
            report = run(args, source, read_config(source), Path(ggufs))
    if args.json == "-":
        print(json.dumps(report))
    whose = "llama.cpp" if args.llama_bin else ""
    if not any(row["peer"].startswith(whose) for cell in report["cells"] for row in cell["results"]):
        refuse(ValueError(f"no {whose or 'peer'} gave a result; the reasons are above"), PROGRAM, code=1)


if __name__ == "__main__":
    started(main)
