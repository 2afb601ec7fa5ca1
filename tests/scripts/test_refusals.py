"""Whatever program is asked for nonsense says so in one sentence of its own, before any work."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import batch
import benchmark
import evaluate
import generate
import gpu_suite
import make_prompts
import needles
import plan
import reproduce
import serve
import steps
import verify
from gpt_fast_sd.loading import BUNDLED
from maintain import build_wheel, record
from scripts import minimal
from tests.helpers import Patch, Refuses

ROOT = Path(__file__).resolve().parents[2]
BUDGET = "--sweep budget --no-compile --batch 2 --context 96 --max-new-tokens 6"
LOSSLESS = "--lossless --no-compile --prompts 3 --longest 90 --max-new-tokens 5 --batch 2"
PRECISION = "--sweep precision --precisions none,none/int8,int8,int8/int8"
DRAWN = "--draw x.json --plots x"
SLOWEST = max(gpu_suite.STAGES.values(), key=lambda stage: stage.seconds)
LONGEST = f"{SLOWEST.seconds + gpu_suite.SPARE:g} for {SLOWEST.name}"
NOT_LOSSLESS = "pairs", "seconds", "context", "plots"
PROGRAMS: dict[str, tuple[Callable[[list[str]], object], str]] = {  # and the flags before those that are wrong
    "generate.py": (generate.main, "--model bundled --no-compile --max-new-tokens 6 --gamma 2"),
    "batch.py": (batch.main, "{folder}/in.jsonl {folder}/out.jsonl --model {model} --no-compile --budget 16"),
    "batch.py otherwise": (batch.main, "--model {model} --no-compile"),
    "benchmark.py": (benchmark.main, "--model {model} --no-compile --max-new-tokens 8 --budget 16 --synthetic"),
    "benchmark.py otherwise": (benchmark.main, ""),
    "evaluate.py": (evaluate.main, "--text {document} --contexts 128 --lengths 96 --depths 0.5 --entries 2 --n 1"),
    "needles.py": (needles.main, "--text {document} --lengths 192 --n 3 --budget 64"),
    "verify.py": (verify.main, "--model bundled --no-compile"),
    "plan.py": (plan.main, "--model meta-llama/Llama-3.1-8B"),
    "plan.py without a model": (plan.main, ""),
    "make_prompts.py": (make_prompts.main, ""),
    "reproduce.py": (reproduce.main, ""),
    "serve.py": (serve.main, "--no-compile --port 0"),
    "minimal.py": (minimal.main, ""),
    "steps.py": (steps.main, ""),
    "gpu_suite.py": (gpu_suite.main, "{folder}/out --device cpu --tiny --pairs 1"),
    "gpu_suite.py otherwise": (gpu_suite.main, "{folder}/out"),
    "record.py": (record.main, ""),
    "build_wheel.py": (build_wheel.main, ""),
}
REFUSED = {
    "generate.py": [
        *((f"--prompt '{text}'", "empty") for text in ("", " \n")),
        (f"--prompt '{'word ' * 20000}'", "over max_seq_len 16,384"),
        *((f"--{flag} nowhere.txt", "nowhere.txt") for flag in ("prompt-file", "prompts")),
        ("--prompt a --draft lookup --budget 64", "--budget does nothing for --draft lookup: leave"),
        ("--prompt a --draft off --compare", "--compare needs a draft policy"),
        ("--prompt a --max-seq-len 6", "together 8, over max_seq_len 6, as --max-seq-len says"),
        ("--prompt a --max-seq-len 20000", "--max-seq-len 20,000 is over the model's 16,384 positions"),
        ("--prompt a --model tests", "no config.json"), ("--prompt a --chat", "chat template"),
        ("--prompt a\udcff", "--prompt: character 1 of the text is U+DCFF"),  # argv of bytes that are no UTF-8
        ("--prompt a --stop a\udcff", "stop holds U+DCFF, half a character"), ("--prompt a --model ''", ""),
        ("--prompt-file {folder}/bytes.txt", "is not UTF-8 text: byte 3, in line 1, is 0xe9"),
        *((f"--prompt a --threads {n}", "--threads") for n in ("0", "1000000000", "99999999999999999999")),
        ("--prompt a --prompts b.jsonl", "not allowed with"),
        ("--document {document}", "stands before prompts: give --prompt"),
        *((f"--prompt a --document {{folder}}/{name}.txt", f"{name}.txt is empty") for name in ("empty", "blank")),
    ],
    "batch.py otherwise": [
        ("nowhere.jsonl out.jsonl", "nowhere.jsonl is not there"),
        ("/dev/null {folder}/out.jsonl", "is no file that can be read twice"),
    ],
    "batch.py": [
        ("--max-seq-len 5000", "--max-seq-len 5,000 is over the model's 4,096 positions"),
        ("--temperature -1", "temperature must be 0 (greedy) or a positive number"), ("--order random", "'random'"),
        ("--tp 2", "tp must divide the number of processes"), ("--rejects nowhere/r.jsonl", "there is no folder"),
    ],
    "benchmark.py": [
        ("--batch 0", "expected whole numbers of at least 1"),
        ("--context 1", "a context has at least 2 tokens, got 1"), ("--context 1m", "as in 1k,4k,500; got '1m'"),
        ("--draft psychic", "there is no policy 'psychic'"),
        ("--budget 8", "budget must be at least 12 for streaming, got 8"), ("--gamma few", "'few'"),
        ("--temperature 0,hot", "expected numbers, as in 0,0.8; got '0,hot'"),
        ("--pairs 0", "--pairs 0 counts acceptance, which is for --sweep budget"),
        ("--plots README.md", "--plots needs a folder"), ("--text README.md", "exclude each other"),
        ("--precisions none", "--precisions does nothing with --sweep size"),
        (f"{PRECISION} --kv-dtype int8", "--kv-dtype is what --precisions varies: name it there"),
        (f"{PRECISION} --precisions int8/int8/int8/int8", "a precision is CACHE, CACHE/DRAFTS or"),
        (f"{PRECISION} --precisions int7", "kv_dtype"), (f"{PRECISION} --draft lookup", "quantize"),
        (f"{PRECISION} --precisions none,none/float8", "quantize 'float8' of a draft runs on device 'cuda'"),
        (f"{PRECISION} --precisions none/int4/int8", "needs a target with plain weights, or of that precision"),
        (f"{PRECISION} --draft quantized", "measures caches in bytes, and quantized reads planes"),
        (f"{PRECISION} --draft-kv-bits 4", "measures caches in bytes, and streaming reads planes"),
    ],
    "benchmark.py otherwise": [
        (f"{BUDGET} --text nowhere.txt", "nowhere.txt: No such file"),
        (f"{BUDGET} --context 5000", "tokens, but 2 prompts of 5,000 need 9,998"),
        (f"{BUDGET} --context 1", "a context of 1 does not fit: from 2 to 16,378"),
        (f"{BUDGET} --context 100,200", "--sweep budget measures with one --context, got 2"),
        (f"{BUDGET} --draft snapkv --budget 16,64", "budget must be at least 64 for snapkv, got 16"),
        (f"{BUDGET} --synthetic", "--sweep budget is about texts: leave --synthetic out"),
        (f"{LOSSLESS} --budget 64,128", "--lossless measures with one --budget, got 2"),
        (f"{LOSSLESS} --shortest 99", "prompts of 99 to 90 tokens"),
        (f"{LOSSLESS} --longest 20000", "tokens, too few for prompts of up to 20,000"),
        (f"{LOSSLESS} --temperature 0.8", "--lossless compares greedy outputs"),
        ("--draw README.md --plots x", "README.md holds no results of this program"),
        ("--draw x.json", "--draw needs --plots DIR to draw into"),
        ("--text README.md README.md", "two texts have one name"), ("--text {folder}/empty.txt", "empty.txt is empty"),
        *((f"{LOSSLESS} --{name} 9", f"--{name} does nothing with --lossless") for name in NOT_LOSSLESS),
        (f"{BUDGET} --prompts 9", "--prompts does nothing with --sweep budget"),
        (f"{BUDGET} --pairs 0 --seconds 9", "--seconds goes on with pairs, and --pairs 0 times none"),
        *((f"--{name} 9", f"--{name} does nothing with --sweep size") for name in ("shortest", "longest")),
        *((f"{DRAWN} --{given}", "does nothing with --draw: leave") for given in ("pairs 9", "json y", "no-compile")),
        (f"{BUDGET} --draft quest,lookup --view full", "view does nothing for quest and lookup"),
        ("--fresh", "--fresh forgets what --json holds, and there is no --json"),
        *((f"--seconds {n}", f"expected a positive number of seconds, got '{n}'") for n in ("inf", "nan", "0")),
    ],
    "evaluate.py": [
        ("--contexts 100 128", "the longest context, 128, must be a multiple of 100"),
        ("--lengths 20000", "the model has 16,384 positions, too few for 20,000 tokens"),
        ("--contexts 16384", "document has 7,"), ("--entries 2000", "over the model's 16,384"),
        ("--entries 5000", "names for facts, too few for 5,000"),
        *((f"--{name} 0", "whole number of at least 1, got '0'") for name in ("entries", "contexts", "lengths")),
        *((f"--depths {depth}", f"expected a number from 0 to 1, got '{depth}'") for depth in ("nan", "2")),
        ("--lengths 12", "a needle does not fit into 12 tokens"), ("--reference nowhere", "no folder nowhere"),
        ("--card x.md", "--card needs --log"), ("--books .", "not allowed with argument --text"),
    ],
    "needles.py": [
        ("--kinds riddle", "there is no kind 'riddle'"),
        ("--lengths 20000", "prompts of 20,000 tokens are over the model's 16,384 positions"),
        ("--lengths 16000", "tokens, too few for prompts of 16,000"), ("--lengths 30", "does not fit into 30 tokens"),
        ("--budget 8", "budget must be at least 12"), ("--fresh", "--fresh forgets what --json holds"),
    ],
    "verify.py": [
        ("--draft off", "--draft off is plain decoding"),
        ("--gamma auto", "expected a whole number of at least 1, got 'auto'"),
        *((f"--context {n}", f"prompts of up to {n:,} tokens: allowed are 16 to") for n in (3, 999_999)),
        ("--batch-size 1000000000", "batch_size 1000000000 x max_seq_len"),
        ("--samples 1000000000000", "expected at most 1,000,000 samples, got '1000000000000'"),
        ("--text nowhere.txt", "nowhere.txt"), ("--text {document} --json {document}", "document.txt"),
        ("--draft quantized", "int8"),
    ],
    "plan.py": [
        ("--device H300", "got 'H300'"), ("--device H200 --tp 3", "tp 3 does not fit the model"),
        ("--device H200 --tp 16", "tp 16 is more than the 8 devices of a machine"),
        ("--device H200 --context 200k", "over the model's 131,072 positions"),
        ("--device H200 --policy foo", "policy must be one of"), ("--device H200 --policy off", "drafts nothing"),
        ("--device H200 --policy lookup", "no published acceptance of lookup is known"),
        ("--device H200 --memory nan", "memory must be a positive number of GiB, got nan"),
        ("--bandwidth 0 --flops 4", "bandwidth must be a positive number of GB/s, got 0"),
        ("--bandwidth 4", "--device says, or --bandwidth and --flops"),
        ("--device H200 --link 100", "--link does nothing on one device: leave it out, or say --tp"),
        ("--kv-dtype fp8", "argument --kv-dtype: invalid choice: 'fp8' (choose from"),
        ("--device H200 --quantize int4 --dtype fp16", "quantize 'int4' needs bf16 weights, not fp16: use"),
        ("--device H200 --quantize int8 --draft-quantize int4", "needs a target with plain weights, or of that preci"),
        ("--device H200 --acceptance {folder}/sweep.json", "sweep.json is damaged: KeyError("),
        ("--device H200 --full-layers 99", "full layers must be from 0 to the model's 32, got 99"),
        ("--device H200 --window 99", "a window of 99 is for models of which some layers attend to everything"),
        ("--device H200 --experts 4/8", "ALL/OWN, of which a token has at least 1 and at most all, got (4, 8)"),
        ("--device H200 --experts x", "expected how many there are and a token has, as in 32/4; got 'x'"),
        ("--device H200 --kv-link 0", "--kv-link must be a positive number of GB/s, got 0"),
    ],
    "plan.py without a model": [
        ("", "there is nothing to plan: --model M says what, or --measured FILE what to compare with"),
        ("--measured README.md", "README.md holds no results"), ("--measured /dev/zero", "/dev/zero holds no results"),
        ("--measured {folder}/sweep.json", "sweep.json is damaged: KeyError("),
        ("--measured sweep.json --plot x.png", "--plot draws a forecast, which needs --model"),
        ("--measured sweep.json --max-new-tokens 9", "--max-new-tokens does nothing without --model: leave it out"),
    ],
    "make_prompts.py": [
        ("ruler:vt", "a source and a file to write are needed"),
        ("ruler:vt {folder}/out", "is made to a length: give --tokens"),
        ("ruler:vt {folder}/out --tokens 10", "takes at least"),
        ("{document} {folder}/out", "holds texts: give --tokens"),
        ("{document} {folder}/out --tokens 2k,4k", "prompts have one --tokens, got 2"),
        ("{document} {folder}/out --tokens 1", "--tokens must be at least 2, got 1"),
        ("nowhere.parquet {folder}/out", "nowhere.parquet"),
        ("{folder}/ints.json {folder}/out", "must be a JSON object"),
        ("{folder}/answers.json {folder}/out", "row 0 has the unknown key 'answer'; known are"),
        ("--score {document}", "line 1"),
    ],
    "reproduce.py": [
        ("magicdec:table9", "there is no recipe 'magicdec:table9'; there are magicdec:table1,"), ("", "which recipe?"),
    ],
    "serve.py": [
        ("--port 70000", "cannot listen at --host 127.0.0.1 --port 70000"),
        ("--host 192.0.2.1", "cannot listen at --host 192.0.2.1 --port 0"),
        ("--host ''", "argument --host: expected a value, got an empty text"),
        ("--max-queue -1", "--max-queue: expected a whole number of at least 1, got '-1'"),
        *((f"--grace {seconds}", f"expected a number of seconds, got '{seconds}'") for seconds in ("-1", "nan", "inf")),
        ("--batch-size 0", "expected a whole number of at least 1, got '0'"),
        ("--max-seq-len 20000", "--max-seq-len 20,000 is over the model's 16,384 positions"),
        ("--draft lookup --budget 64", "--budget does nothing for --draft lookup: leave"),
        ("--tp 2", "unrecognized arguments: --tp 2"),
    ],
    "minimal.py": [
        *((f"--gamma {gamma}", f"gamma must be from 0 to 16, got {gamma}") for gamma in (-1, 17)),
        ("--budget 4", "budget must be from 5 to 1000000, got 4"),
        *((f"--temperature {t}", f"temperature must be from 0 to 9, got {t}") for t in ("-0.5", "nan")),
        ("--max-new-tokens 0", "max_new_tokens must be from 1 to 1000000, got 0"),
        ("--seed -1", "seed must be from 0 to 1000000000, got -1"), ("--prompt ''", "prompt 0 is empty"),
        (f"--prompt I --prompt '{'so ' * 16_384}'", "prompt 1 has "),
        ("--prompt I --max-new-tokens 16384", "with the new ones, 16,384 fit"),
        ("--prompt-file nowhere.txt", "No such file or directory: 'nowhere.txt'"),
        ("--prompt-file {folder}/bytes.txt", "can't decode byte 0xe9"),
        ("--model 'no such model'", "no folder no such model"),
    ],
    "steps.py": [("--batch 0", "--batch")],
    "gpu_suite.py": [
        ("--stages machine,lunch", "--stages names 'lunch'; there are test-smoke,"),
        *((f"--budget-seconds {s}", f"--budget-seconds must be at least {LONGEST}, got {s}") for s in ("0", "nan")),
        ("--stages machine,time-select --budget-seconds 10", "at least 35 for time-select, got 10"),
        ("--pairs 0", "--pairs must be at least 1, got 0"),
        ("--texts nowhere.txt", "there is no text file nowhere.txt"),
    ],
    "gpu_suite.py otherwise": [("--device cpu", "--device cpu is for a dry run: give --tiny too")],
    "record.py": [
        ("run.png", "ending in .svg"), ("nowhere/run.svg", "a folder that is there"), ("run.svg", "run.cast"),
        ("run.svg --speed 0", "--speed must be greater than 0, got 0.0"),
        ("run.svg --hold inf -- true", "--hold must be finite, got inf"), ("{folder}/other.svg", "is no recording"),
    ],
    "build_wheel.py": [
        ("--sets avx3", "--sets avx3: CPUs of this kind have "),
        ("--head-dims 64 512", "--head-dims 512: allowed are multiples of 16 up to 256"),
        ("--dist {folder}/in.jsonl", "in.jsonl: File exists"),  # before anything is built
        ("--dist {folder}/in.jsonl/dist", "in.jsonl/dist: Not a directory"),
    ],
}  # fmt: skip
ALIKE = [  # programs, of which each has this flag
    ("batch.py benchmark.py evaluate.py needles.py generate.py serve.py", "--model nowhere", "no folder nowhere"),
    ("batch.py benchmark.py evaluate.py needles.py plan.py serve.py verify.py", "--model ''", "expected a value, got"),
    ("benchmark.py evaluate.py needles.py make_prompts.py", "--seed -1", "expected a whole number from 0 to 2**63 - 1"),
    ("benchmark.py evaluate.py needles.py steps.py", "--json nowhere/x.json", "there is no folder"),
    ("batch.py benchmark.py needles.py serve.py", "--draft standalone", "needs draft_model"),
    ("batch.py benchmark.py generate.py serve.py", "--device gpu", "device must be one of auto, cpu, cuda, got 'gpu'"),
]
ROWS = [(program, *row) for program, rows in REFUSED.items() for row in rows]
ROWS += [(program, flags, said) for programs, flags, said in ALIKE for program in programs.split()]


@pytest.mark.parametrize(("program", "flags", "said"), ROWS, ids=lambda text: text[:60])
def test_nonsense_is_refused_in_one_sentence(
    program: str, flags: str, said: str, refuses: Refuses, tiny_folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(build_wheel, "build_kernel", None)
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 2]}\n')
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "bytes.txt").write_bytes(b"caf\xe9")
    (tmp_path / "ints.json").write_text("[1, 2]")
    (tmp_path / "answers.json").write_text('[{"prompt": "a", "answer": "b"}]')
    (tmp_path / "other.cast").write_text('{"version": 2}\n["a", "o", "b"]\n')
    point = '{"status": "measured", "acceptance_by_position": [0.5]}'  # lacks nearly all
    (tmp_path / "sweep.json").write_text(f'{{"benchmark": "batch", "settings": {{}}, "points": [{point}]}}')
    main, before = PROGRAMS[program]
    argv = f"{before} {flags}".format(folder=tmp_path, model=tiny_folder, document=BUNDLED / "document.txt")
    found = refuses(main, *shlex.split(argv))
    assert found.startswith(f"{program.split()[0]}: ") and said in found
    assert not (tmp_path / "out").exists()
