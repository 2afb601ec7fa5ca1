"""No program replaces what it reads, and what it wrote is not lost: outputs are checked before, and saved after."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import common
import batch
import benchmark
import evaluate
import files
import generate
import needles
import peers
import plan
from gpt_fast_sd.loading import BUNDLED
from tests.helpers import Patch, Printed, Refuses, ahead, few

ROOT = Path(__file__).resolve().parents[2]
SHORT = "--model bundled --prompt One --max-new-tokens 3 --draft lookup --no-compile --device cpu"  # auto tries all
PROGRAMS: dict[str, tuple[Callable[[list[str]], object], list[str]]] = {
    # {} is a file that is read; then flags of what is written
    "generate.py --prompts": (generate.main, ["--prompts", "{}"]),
    "generate.py --prompt-file": (generate.main, ["--prompt-file", "{}"]),
    "generate.py --document": (generate.main, ["--prompt", "a", "--document", "{}"]),
    "batch.py": (batch.main, ["{}"]),
    "benchmark.py": (benchmark.main, ["--fresh", "--text", "{}"]),
    "benchmark.py --sweep budget": (benchmark.main, ["--fresh", "--sweep", "budget", "--text", "{}"]),
    "needles.py": (needles.main, ["--text", "{}"]),
    "peers.py": (peers.main, ["--text", "{}"]),
    "evaluate.py": (evaluate.main, ["--text", "{}"]),
    "plan.py": (plan.main, ["--measured", "{}"]),
}
OUTPUTS = {
    "generate.py --prompts": ["--output", "--json", "--profile", "--report"],
    "generate.py --prompt-file": ["--output", "--report"], "generate.py --document": ["--output", "--report"],
    "batch.py": ["", "--rejects"],
}  # fmt: skip
EVERY = [(program, flag) for program in PROGRAMS for flag in OUTPUTS.get(program, ["--json"])]
CASES = [(*one, "same") for one in EVERY] + [(*EVERY[0], how) for how in ("symlink", "hard link", "another way")]


@pytest.mark.parametrize(("program", "flag", "how"), CASES)
def test_what_is_read_is_never_replaced(program: str, flag: str, how: str, tmp_path: Path, refuses: Refuses) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "One"}\n')
    known = {"same": source, "another way": tmp_path / ".." / tmp_path.name / source.name}
    output = known.get(how, tmp_path / "other.jsonl")
    if how == "symlink":
        output.symlink_to(source)
    elif how == "hard link":
        os.link(source, output)
    main, argv = PROGRAMS[program]
    given = [*(part.format(source) for part in argv), *([flag] if flag else []), str(output)]
    if program == "batch.py" and flag:  # it also needs an output
        given.insert(1, str(tmp_path / "out.jsonl"))
    assert "are the same file" in refuses(main, *given)
    assert source.read_text() == '{"prompt": "One"}\n'


@pytest.mark.parametrize("name", ["out.state.json", "out.jsonl.lock"])
def test_what_batch_keeps_is_no_input_either(name: str, tmp_path: Path, refuses: Refuses) -> None:
    source, output = tmp_path / name, tmp_path / "out.jsonl"
    source.write_text('{"prompt": "One"}\n')
    for argv in ([source, output], [ROOT / "README.md", output, "--rejects", source]):
        assert "are the same file" in refuses(batch.main, *argv)
    assert source.read_text() == '{"prompt": "One"}\n'


@pytest.mark.parametrize("model", ["bundled", None])
@pytest.mark.parametrize("flag", ["--json", "--report"])
def test_a_file_of_the_model_is_never_replaced(flag: str, model: str | None, refuses: Refuses) -> None:
    config = BUNDLED / "config.json"
    before = config.read_bytes()
    argv = ["--prompt", "a", *(["--model", model] if model else []), flag, config]
    assert "would take the place of a file of --model" in refuses(generate.main, *argv)
    assert config.read_bytes() == before


def test_two_outputs_are_two_files(tmp_path: Path, refuses: Refuses) -> None:
    for flag in ("--json", "--report"):
        found = refuses(generate.main, "--prompt", "a", "--output", tmp_path / "x", flag, f"{tmp_path}/./x")
        assert re.search(rf"(--output|{flag}) .*x and (--output|{flag}) .*x are the same file", found)
    assert not any(tmp_path.iterdir())


# ---- writable is tried, and what was written is not lost -------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/dev/full", "it is no file that can be replaced"), ("/proc/x", "cannot write /proc/x: "),
        ("/nowhere/x", "there is no folder /nowhere"), ("/tmp", "it is a folder"), ("loop", "cannot write"),
        ("/dev/null/x", "there is no folder"),
    ],
)  # fmt: skip
@pytest.mark.skipif(sys.platform != "linux", reason="these are Linux's names")
def test_what_cannot_be_written_is_refused_before_the_work(
    path: str, why: str, tmp_path: Path, monkeypatch: Patch, refuses: Refuses
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert why in refuses(generate.main, "--prompt", "a", "--output", path)


@pytest.mark.parametrize("call", ["new", "old"])
def test_what_may_not_be_written_is_refused(call: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Root may write anything: the system's refusal is made up."""
    (path := tmp_path / "x").write_text("old")

    def refuse(name: Any, flags: int, *_: Any) -> None:
        if bool(flags & os.O_CREAT) == (call == "new"):
            raise PermissionError(errno.EACCES, "Permission denied", str(name))

    ahead(monkeypatch, os, "open", refuse)
    with pytest.raises(ValueError, match=r"cannot write .*x: Permission denied"):
        files.require_writable(path)
    assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["x"]


def test_what_a_link_or_a_long_name_names_is_written(tmp_path: Path) -> None:
    """Outputs are linked to a larger disk, say: what is written beside the link is neither there nor has it room."""
    there, link = tmp_path / "there", tmp_path / "run.json"
    there.mkdir()
    link.symlink_to(there / "run.json")
    (partial := there / ".run.json.partial").write_text("somebody's own")
    long = tmp_path / ("\u8a9e" * 80 + ".json")  # 245 bytes, of which a file system takes 255
    files.require_writable(long)
    files.save({long: "{}"}, "generate.py")
    for text in ("new", "newer"):
        files.require_writable(link)
        files.save({link: text}, "generate.py")
        assert link.is_symlink() and (there / "run.json").read_text() == text
    assert {one.name for one in there.iterdir()} == {"run.json", partial.name}
    assert partial.read_text() == "somebody's own"
    assert {one.name for one in tmp_path.iterdir()} == {"there", "run.json", long.name}


def test_generate_says_where_what_a_full_disk_refused_is(tmp_path: Path, monkeypatch: Patch, capsys: Printed) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out.jsonl").write_text("older")

    def full(path: Path, text: str) -> None:
        if path.name in ("out.jsonl", "run.html"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    ahead(monkeypatch, files, "write_whole", full)
    with pytest.raises(SystemExit) as stopped:
        generate.main([*SHORT.split(), "--output", "out.jsonl", "--report", "run.html", "--profile", "trace.json"])
    out, err = capsys.readouterr()
    assert stopped.value.code == 1 and "Traceback" not in err and "tokens/s" in out
    (kept,), (page,) = tmp_path.glob("out.*.jsonl"), tmp_path.glob("run.*.html")
    assert (tmp_path / "out.jsonl").read_text() == "older"
    assert f"what it was to hold is in {kept}" in err and '"finish_reason": "length"' in kept.read_text()
    assert err.strip().splitlines()[-1].endswith(f"what it was to hold is in {page}")
    assert {one.name for one in tmp_path.iterdir()} == {kept.name, page.name, "out.jsonl", "trace.json"}
    assert "traceEvents" in (tmp_path / "trace.json").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="there is no ulimit")
@pytest.mark.parametrize("n_shards", few([1, 12], [12]))  # of weights, each of which is kept open
def test_a_process_that_may_open_few_files_works_or_says_so(n_shards: int, tiny_folder: Path, tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    shutil.copy(tiny_folder / "config.json", model)
    stored = load_file(tiny_folder / "model.safetensors")
    names = {name: f"part-{i % n_shards}.safetensors" for i, name in enumerate(stored)}
    for file in set(names.values()):
        save_file({name: tensor for name, tensor in stored.items() if names[name] == file}, model / file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "in.jsonl").write_text('{"tokens": [1, 2]}\n')
    for program, given in (("batch.py", "in.jsonl out.jsonl"), ("generate.py", "--prompts in.jsonl --json run.json")):
        command = f"{ROOT / 'scripts' / program} {given} --model model --max-new-tokens 3 --no-compile --device cpu"
        limited = ["bash", "-c", f"ulimit -n 12; exec {sys.executable} {command}"]
        done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True)
        made = {path.name for path in tmp_path.iterdir()} - {"model", "in.jsonl"}
        if n_shards == 1:
            assert done.returncode == 0 and made >= {"out.jsonl"}, done.stderr
        else:
            assert done.returncode == 2 and made <= {"out.jsonl.lock"}
            assert re.fullmatch(rf"{program}: model/\S+ .*Too many open files.*\n", done.stderr), done.stderr


# ---- stdout ----------------------------------------------------------------------------------------------------------

PLAN = [sys.executable, str(ROOT / "scripts" / "plan.py"), "--model", "bundled", "--device", "H200"]


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = subprocess.run(
        ["bash", "-c", f'{" ".join(PLAN)} --json {file} | head -1; exit "${{PIPESTATUS[0]}}"'],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 141) and done.stderr == "" and len(done.stdout.splitlines()) == 1
    assert file.exists()  # what was asked for beside the text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_stdout_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(PLAN, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "stdout: No space left on device\n")


def test_text_that_an_encoding_lacks_ends_nothing(tmp_path: Path) -> None:
    """A name of a file may have half a character, and a report that name."""
    raw = io.BytesIO()
    out = common.Stdout(io.TextIOWrapper(raw, encoding="latin-1"))
    print("na\u00efve, \u4e2d", file=out, flush=True)
    assert raw.getvalue() == b"na\xefve, ?\n"
    paths = [tmp_path / "report.html", tmp_path / "run.json"]
    files.save(dict.fromkeys(paths, "na\udcefve"), "generate.py")
    assert [path.read_text(encoding="utf-8") for path in paths] == ["na\\udcefve"] * 2


def test_generation_ends_where_nobody_reads_and_nothing_else_is_written(monkeypatch: Patch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def fileno(self) -> int:
            return nowhere.fileno()

    rounds: list[object] = []
    show = generate.Screen.show
    monkeypatch.setattr(generate.Screen, "show", lambda *args: (rounds.append(args), show(*args))[1])
    flags = SHORT.replace("3", "30").split()
    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", Gone())
        monkeypatch.setattr(sys, "argv", ["generate.py", *flags])
        with pytest.raises(SystemExit) as stopped:
            common.started(generate.main)
        assert stopped.value.code == 141 and len(rounds) == 1
        monkeypatch.setattr(sys, "stdout", common.Stdout(Gone()))
        # what several processes end by, of whom torchrun ends the others: `started` comes later
        with pytest.raises(SystemExit) as stopped:
            generate.main(flags)
    assert stopped.value.code == 141


def test_a_warning_of_ours_is_one_line_and_others_name_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        for text, kind, file in ("few rows", UserWarning, common.__file__), ("old", DeprecationWarning, "x.py"):
            print(warnings.formatwarning(text, kind, file, 7, ""), end="")
        return 0

    before = warnings.formatwarning
    with pytest.raises(SystemExit):
        common.started(main)
    assert capsys.readouterr().out == "warning: few rows\nx.py:7: DeprecationWarning: old\n"
    assert warnings.formatwarning is before


@pytest.mark.parametrize("closed", few([">&-", "2>&-", "<&- >&- 2>&-"], ["<&- >&- 2>&-"]))
def test_a_program_runs_although_its_streams_are_closed(closed: str, tmp_path: Path) -> None:
    """Without a stderr progress could not be drawn: exit code 1, and no word."""
    command = f"{sys.executable} {ROOT / 'scripts' / 'generate.py'} {SHORT} --json run.json {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "run.json").exists()


def test_a_model_that_was_downloaded_is_not_replaced(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(pytest.importorskip("huggingface_hub.constants"), "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="would take the place of a file of --model"):
        files.check_files({"--json": snapshot / "config.json"}, {"--model": "owner/name"})
    files.check_files({"--json": tmp_path / "out.json"}, {"--model": ["owner/name", "owner/other"]})
