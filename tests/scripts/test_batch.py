"""scripts/batch.py as a user types it: killed and started again, fed with nonsense, refused where it cannot go on."""

import errno
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import batch
import journal
from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.model import load_model, save_hugging_face
from gpt_fast_sd.serving import Penalties
from gpt_fast_sd.serving.lifecycle import Access
from gpt_fast_sd.serving.scheduling import Schedule
from tests.helpers import Patch, Printed, Refuses, few, random_ids, tiny_model
from tests.tp.spawn import run, start_without_agent, torchrun

PROGRAM = Path(batch.__file__)
Record = dict[str, Any]
FLAGS = ["--no-compile", "--gamma", "2", "--budget", "16", "--batch-size", "3", "--max-seq-len", "200"]


def write_lines(path: Path, records: Sequence[Record | str]) -> Path:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def prompts(n: int, max_tokens: int = 6) -> list[Record]:
    """Lines of ragged length, a third of them sampled, of which half have two or three completions."""
    return [
        {"prompt": random_ids(5 + i % 7, seed=i), "id": f"line {i}", "max_tokens": max_tokens + i % 5}
        | ({"temperature": 0.9} | ({"n": 2 + i // 6 % 2} if i % 2 else {}) if i % 3 == 0 else {})
        for i in range(n)
    ]


class Job:
    """A job of batch.py in this process: in.jsonl, out.jsonl and out.rejects.jsonl of a folder of its own."""

    def __init__(self, model: Path, folder: Path, refuses: Refuses, capsys: Printed) -> None:
        self.model, self.folder, self.refuses, self.capsys = model, folder, refuses, capsys
        self.source, self.output, self.rejected = (folder / f"{name}.jsonl" for name in ("in", "out", "out.rejects"))

    def give(self, *records: Record | str) -> None:
        write_lines(self.source, records)

    def argv(self, *flags: object, **other: Path) -> list[str]:
        source, output, model = (str(other.pop(name, getattr(self, name))) for name in ("source", "output", "model"))
        assert not other
        return [source, output, "--model", model, *FLAGS, *map(str, flags)]

    def code(self, *flags: object, **other: Path) -> int:
        try:
            batch.main(self.argv(*flags, **other))
        except SystemExit as stopped:
            assert isinstance(stopped.code, int)
            return stopped.code
        return 0

    def refusal(self, *flags: object, **other: Path) -> str:
        return self.refuses(batch.main, *self.argv(*flags, **other))

    @property
    def lines(self) -> list[Record]:
        return read_lines(self.output)

    @property
    def places(self) -> list[int]:
        """Of the lines that are written, in their order."""
        return [record["index"] for record in self.lines]

    @property
    def rejects(self) -> list[Record]:
        return read_lines(self.rejected)


@pytest.fixture
def job(tiny_folder: Path, tmp_path: Path, refuses: Refuses, capsys: Printed) -> Job:
    return Job(tiny_folder, tmp_path, refuses, capsys)


# ---- what comes out --------------------------------------------------------------------------------------------------


def test_every_line_is_continued_as_the_engine_alone_continues_it(job: Job) -> None:
    records = prompts(8)
    records[1] |= {"frequency_penalty": 2, "logit_bias": {"7": 50}}
    job.give(*records)
    assert job.code("--seed", 5) == 0
    engine = Engine(load_model(job.model), None, EngineConfig(batch_size=3, max_seq_len=200, compile=False))
    params = [
        SamplingParams(max_tokens=r["max_tokens"], temperature=r.get("temperature", 0.0), processor=Penalties.of(r))
        for r in records
    ]
    expected, found = engine.generate([r["prompt"] for r in records], params), job.lines
    assert [(r["index"], r["id"]) for r in found] == [(i, r["id"]) for i, r in enumerate(records)]
    several = found.pop(3)["completions"]  # of which the others have other seeds
    assert len(several) == 2 and several[0]["tokens"] != several[1]["tokens"]
    for record, completion in zip(found, expected[:3] + expected[4:], strict=True):
        assert record["finish_reason"] == completion.finish_reason
        assert set(record) == {"index", "id", "tokens", "text", "finish_reason", "stats"}
        if "temperature" not in records[record["index"]]:  # speculation draws other samples of the same distribution
            assert record["tokens"] == completion.tokens
    assert not job.rejected.exists()
    job.give("", "")
    nothing = job.folder / "nothing.jsonl"
    assert job.code(output=nothing) == 0 and nothing.read_bytes() == b""


def test_lines_that_make_no_sense_are_rejected_by_number(job: Job) -> None:
    fine: Record = {"tokens": [1, 2, 3]}
    wrong: list[tuple[Record | str, str]] = [
        ("{bad", "not JSON: "), ("[1]", "must be a JSON object"), ("[" * 100_000, "JSON that is nested too deep"),
        ('{"prompt": [1], "prompt": [2]}', "the key 'prompt' comes twice"),
        ('{"prompt": [1], "ignore_eos": 1}', "ignore_eos must be true or false"),
        ('{"prompt": [1], "top_p": NaN}', "not JSON: NaN"),
        ({"prompt": [1], "temperatur": 1}, "unknown key 'temperatur'"),
        ({"prompt": [1], "tokens": [1]}, "exactly one of"), ({"id": 7}, "exactly one of"),
        ({"prompt": [1, "a"]}, "tokens must be a list of whole numbers"),
        ({"prompt": [99999]}, "the prompt holds token id 99999"), ({"prompt": []}, "the prompt is empty"),
        ({"prompt": "text"}, "no tokenizer"), ({"prompt": [1], "top_p": 3}, "top_p must be"),
        ({"prompt": [1], "logit_bias": {"999": 1}}, "logit_bias holds token id 999"),
        ({"prompt": [1], "n": 1.5}, "n must be a whole number from 1 to 10,000, got 1.5"),
        ({"prompt": [1], "stop": "x"}, "no tokenizer to find them with"),
        ({"prompt": [1] * 198, "max_tokens": 3}, "too long: 198 tokens and max_tokens 3 are 201, over --max-seq-l"),
    ]  # fmt: skip
    job.give(fine, "", *(record for record, _ in wrong), fine)
    with job.source.open("ab") as file:
        file.write(b'{"prompt": "caf\xe9"}\n')
    wrong.append(("", "not UTF-8 text: byte 15 is 0xe9"))
    assert job.code("--max-new-tokens", "4") == 4
    assert job.places == [0, 2 + len(wrong) - 1]
    rejects = job.rejects
    assert [r["line"] for r in rejects] == [*range(3, 2 + len(wrong)), 3 + len(wrong)]
    for reject, (_, said) in zip(rejects, wrong, strict=True):
        assert said in reject["reason"], reject
    assert rejects[0]["input"] == "{bad"
    said = job.capsys.readouterr().out
    assert "2 prompts continued" in said and f"{len(wrong)} lines were rejected" in said
    before = job.output.read_bytes(), job.rejected.read_bytes()
    assert job.code("--max-new-tokens", "4") == 4  # nothing is left, nothing comes twice
    assert before == (job.output.read_bytes(), job.rejected.read_bytes())


def test_a_line_longer_than_any_is_rejected_and_not_held(job: Job, monkeypatch: Patch) -> None:
    """One line of zeros, of 20 GB and more, took as much memory."""
    monkeypatch.setattr(batch, "LONGEST_LINE", 64)
    fine = {"tokens": [1, 2, 3]}
    blank = " " * 65  # a line that begins so was skipped, or cut where its blanks are
    too_long = ["x" * 65, "x" * 1000, "x" * 129, f"{blank}x", f'{{"tokens": [1]}}{blank}x', f"{blank}{blank}"]
    job.give(fine, "x" * 64, *too_long, fine, " " * 64)
    assert job.code("--max-new-tokens", "2") == 4
    assert job.places == [0, 8]
    rejects = job.rejects
    assert [(reject["index"], len(reject["input"])) for reject in rejects] == [(i, 64) for i in range(1, 8)]
    assert all(reject["reason"] == "too long: over 64 bytes" for reject in rejects[1:])


def fail_where(monkeypatch: Patch, is_bad: Callable[[Any], bool], error: Exception) -> list[int]:
    """Let a round raise this error if a row's request is bad; the list grows with each."""
    launch, failed = Schedule._launch, list[int]()

    def launched(self: Schedule, speculate: bool) -> Any:
        rows = [row for row in self.slots if row]
        if any(is_bad(row) for row in rows) and any(row.rounds for row in rows):  # in the middle of its text
            failed.append(len(rows))
            raise error
        return launch(self, speculate)

    monkeypatch.setattr(Schedule, "_launch", launched)
    return failed


@pytest.mark.parametrize("order", ["input", "finished"])
def test_a_line_that_fails_alone_is_rejected(job: Job, monkeypatch: Patch, order: str) -> None:
    records, whole, bad = prompts(20), job.folder / "whole.jsonl", [4, 5, 6, 7, 11, 19]  # four one after another
    records[4]["n"] = 4  # more than there are slots
    job.give(*records)
    assert job.code("--order", order, output=whole) == 0
    ids = [records[i]["prompt"] for i in bad]
    failed = fail_where(monkeypatch, lambda row: row.prompt in ids, RuntimeError("shapes\nof two"))
    assert job.code("--order", order) == 4
    assert failed.count(1) == len(bad) - 1 and max(failed) == 3  # among others, then alone
    n_failed = len(failed)
    found = {r["index"]: r for r in job.lines}
    assert found.keys() == {*range(20)} - {*bad}
    assert order == "finished" or [*found] == sorted(found)
    for record in read_lines(whole):
        if record["index"] in found:
            each = [[c["tokens"] for c in r.get("completions", [r])] for r in (found[record["index"]], record)]
            assert each[0] == each[1]
    rejects = job.rejects
    assert [(r["index"], json.loads(r["input"])["id"]) for r in rejects] == [(i, f"line {i}") for i in bad]
    assert "the engine failed on it, alone too: RuntimeError: shapes of two (test_batch.py:" in rejects[0]["reason"]
    assert "each line is tried alone" in job.capsys.readouterr().err
    assert job.code("--order", order) == 4 and len(failed) == n_failed  # all is done


def test_a_line_that_fails_late_does_not_stop_those_behind_it(job: Job, monkeypatch: Patch) -> None:
    monkeypatch.setattr(batch, "AHEAD", 2)
    job.give(*({"prompt": [7], "max_tokens": 60 if i == 0 else 1} for i in range(20)))
    fail_where(monkeypatch, lambda row: row.params.max_tokens == 60 and len(row.tokens) > 30, RuntimeError("late"))
    assert job.code("--ignore-eos", "--draft", "off") == 4
    assert job.places == [*range(1, 20)]


def test_an_engine_that_fails_before_it_takes_a_line_ends_the_job(job: Job, monkeypatch: Patch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no clock")
        yield

    monkeypatch.setattr(Schedule, "run", broken)
    job.give(*prompts(3))
    assert job.code() == 1 and not job.rejected.exists()


def test_an_error_of_what_reads_the_lines_is_not_the_engine_s(job: Job, monkeypatch: Patch) -> None:
    def short_of_memory(share: batch.Share) -> Any:
        yield from ((i, json.dumps(record).encode()) for i, record in enumerate(prompts(5)))
        raise MemoryError("a line of 100 GB")

    job.give(*prompts(9))
    monkeypatch.setattr(batch.Share, "lines", short_of_memory)
    monkeypatch.setattr(batch.Share, "__len__", lambda share: 9)
    with pytest.raises(MemoryError):
        job.code()


def ended(job: Job) -> list[str]:
    """What is said on stderr by a job that ends, rejects nothing, and can be gone on with."""
    assert job.code() == 1
    said = job.capsys.readouterr().err.strip().splitlines()
    assert said[-1].endswith("the same command goes on from here") and not job.rejected.exists()
    return said


@pytest.mark.parametrize(("error", "tries"), [(RuntimeError("no room"), 3), (torch.AcceleratorError("lost"), 1)])
def test_an_engine_that_fails_on_every_line_rejects_none(job: Job, monkeypatch: Patch, error: Any, tries: int) -> None:
    job.give(*prompts(9))
    with monkeypatch.context() as patched:
        failed = fail_where(patched, lambda row: True, error)
        assert ended(job)[-1].startswith(f"batch.py: the engine failed: {type(error).__name__}: ")
    assert len(failed) == tries
    assert job.code() == 0 and len(job.lines) == 9


def test_an_engine_that_broke_blames_no_line(job: Job, monkeypatch: Patch) -> None:
    """It refuses every later call, and says that a new one must be built: a line is not to blame for that."""
    job.give(*prompts(9))
    failed, at_work = [], Access.at_work

    def breaking(self: Access, *args: Any) -> Any:
        if failed:
            self.failure = failed[0]  # as that of a device which is lost
        return at_work(self, *args)

    with monkeypatch.context() as patched:
        calls = fail_where(patched, lambda row: not failed.append("RuntimeError: once"), RuntimeError("once"))
        patched.setattr(Access, "at_work", breaking)
        said = ended(job)
    assert len(calls) == 1 and "build a new engine" in said[-1]
    assert any("each line is tried alone" in line for line in said)
    assert job.code() == 0 and len(job.lines) == 9


def test_an_error_among_processes_is_left_to_their_guard(job: Job, monkeypatch: Patch) -> None:
    """A rank that is lost fails its peers in their own ways: no line is tried alone, and none is rejected."""
    job.give(*prompts(9))
    lost, work = dist.DistBackendError("Connection closed by peer"), batch.run
    failed = fail_where(monkeypatch, lambda row: True, lost)

    def among_others(engine: Engine, *args: Any) -> int:
        object.__setattr__(engine.parallel, "mesh", object())
        try:
            return work(engine, *args)
        finally:
            object.__setattr__(engine.parallel, "mesh", None)

    monkeypatch.setattr(batch, "run", among_others)
    with pytest.raises(dist.DistBackendError) as caught:
        job.code()
    assert caught.value is lost and len(failed) == 1
    assert "tried alone" not in job.capsys.readouterr().err and not job.rejected.exists()


class Watched:
    """What a run reads, finishes and keeps, and its engine."""

    def __init__(self, monkeypatch: Patch) -> None:
        self.read = self.finished = self.most_ahead = self.most_kept = self.rounds = self.row_rounds = 0
        lines, finished, stream = batch.Share.lines, batch.Writer.finished, Engine.stream

        def read(share: batch.Share) -> Any:
            for line in lines(share):
                self.read += 1
                self.most_ahead = max(self.most_ahead, self.read - self.finished)
                yield line

        def noted(writer: batch.Writer, task: batch.Task) -> None:
            finished(writer, task)
            self.finished += 1
            self.most_kept = max(self.most_kept, len(writer._held))

        def counted(engine: Engine, *args: Any) -> Any:
            yield from stream(engine, *args)
            self.rounds += engine.stats.rounds
            self.row_rounds += engine.stats.row_rounds

        monkeypatch.setattr(batch.Share, "lines", read)
        monkeypatch.setattr(batch.Share, "__len__", lambda share: 1)
        monkeypatch.setattr(batch.Writer, "finished", noted)
        monkeypatch.setattr(Engine, "stream", counted)


def test_slots_do_not_run_dry_before_the_file_ends(job: Job, monkeypatch: Patch) -> None:
    watched = Watched(monkeypatch)
    job.give(*({"prompt": [1, i], "max_tokens": 64 if i in (0, 47) else 2} for i in range(100)))
    assert job.code("--order", "finished", "--draft", "off", "--ignore-eos") == 0
    assert watched.row_rounds == 2 * 64 + 98 * 2
    assert watched.rounds <= 115  # three slots: 108, were it to come out even
    assert (watched.read, watched.finished, watched.most_ahead) == (100, 100, 3)


def test_lines_wait_behind_a_slow_one_unless_they_are_written_as_they_finish(job: Job, monkeypatch: Patch) -> None:
    watched = Watched(monkeypatch)
    monkeypatch.setattr(batch, "AHEAD", 4)
    job.give(*({"prompt": [1, i], "max_tokens": 90 if i == 0 else 2} for i in range(60)))
    assert job.code("--draft", "off", "--ignore-eos") == 0 and job.places == [*range(60)]
    assert watched.most_kept == 4 * 3 - 1  # all that were read but the first
    assert (watched.read, watched.finished, watched.most_ahead) == (60, 60, 3)  # read when a slot is free
    watched.most_kept = 0
    flags, finished = ["--draft", "off", "--ignore-eos", "--order", "finished"], job.folder / "any.jsonl"
    assert job.code(*flags, output=finished) == watched.most_kept == 0
    lines = read_lines(finished)
    assert lines[0]["index"] != 0 and sorted(lines, key=lambda r: r["index"]) == job.lines


# ---- killed and started again ----------------------------------------------------------------------------------------


def kill_when(folder: Path, n_lines: int, process: subprocess.Popen[str]) -> None:
    """Kill it (SIGKILL) once its job has written so many lines, in whatever part of its output."""
    end = time.monotonic() + 120
    while sum(path.read_bytes().count(b"\n") for path in folder.glob("out.jsonl*")) < n_lines:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("order", "kills"), few([("input", [25]), ("input", [3, 25]), ("finished", [10])], [("input", [25])])
)
def test_killed_and_started_again_nothing_is_lost_or_doubled(job: Job, order: str, kills: list[int]) -> None:
    records: list[Record | str] = [*prompts(60, max_tokens=24)]
    records[5] = records[40] = "{bad"
    job.give(*records)
    for n_lines in kills:
        command = [sys.executable, str(PROGRAM), *job.argv("--order", order)]
        kill_when(job.folder, n_lines, subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True))
        assert n_lines <= len(job.output.read_bytes().splitlines()) < 58
        with job.output.open("ab") as file:  # as if the machine had failed in the middle of a line
            file.write(b'{"index": 57, "id": "line 57", "tok')
    whole = job.folder / "whole.jsonl"
    assert job.code("--order", order) == job.code("--order", order, output=whole) == 4
    expected, found = read_lines(whole), job.lines
    if order == "finished":
        expected, found = (sorted(lines, key=lambda r: r["index"]) for lines in (expected, found))
    assert found == expected and len(found) == 58
    assert job.rejected.read_bytes() == (job.folder / "whole.rejects.jsonl").read_bytes()


LOST = re.compile(r"rank \d of 2 stops: another rank is gone, or did not answer within 1800 s \(.*\n")


def job_of_two(folder: Path, tp: int, model: Path | str, n_lines: int = 60) -> tuple[list[object], Path]:
    """The arguments of a job for two ranks, and its output."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    write_lines(source, [*prompts(n_lines, max_tokens=24), "{bad", "{bad"])
    return [source, output, "--model", model, *FLAGS, "--device", "cpu", "--tp", tp], output


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "victim"), [(2, 1), (2, 0), (1, 1), (1, 0)])
def test_a_rank_that_is_killed_ends_the_other_and_loses_no_line(tp: int, victim: int, tmp_path: Path) -> None:
    """As one model in two parts and as two replicas, of which one still ends its own share; no agent kills it."""
    args, output = job_of_two(tmp_path, tp, "bundled")
    ranks = start_without_agent(2, PROGRAM, *args)
    try:
        kill_when(tmp_path, 8, ranks[victim])
        said, errors = ranks[1 - victim].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[1 - victim].returncode == 1 and said == ""
    assert LOST.fullmatch(errors.splitlines(keepends=True)[-1]) and "Traceback" not in errors, errors
    kept = [path.read_bytes() for path in sorted(tmp_path.glob("out.jsonl*"))]
    done = run(torchrun(2, PROGRAM, *args))
    # torchrun takes any other code for a crash
    assert done.returncode == 0 and "60 prompts continued" in done.stdout, done.stderr[-500:]
    assert "2 lines were rejected" in done.stdout and len(read_lines(tmp_path / "out.rejects.jsonl")) == 2
    lines = {json.loads(line)["index"]: line for line in output.read_bytes().splitlines(keepends=True)}
    assert [*lines] == [*range(60)]
    for line in b"".join(kept).splitlines(keepends=True)[:-1]:
        assert line == lines[json.loads(line)["index"]]
    assert not [*tmp_path.glob("*.part*")]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_what_one_rank_cannot_do_is_one_sentence_of_each(tp: int, tiny_folder: Path, tmp_path: Path) -> None:
    """The other one printed where in the middle of waiting it was."""
    args, output = job_of_two(tmp_path, tp, tiny_folder)
    output.write_text("my notes\n")
    ranks = start_without_agent(2, PROGRAM, *args)
    (out, first), (_, second) = (rank.communicate(timeout=120) for rank in ranks)
    assert out == "" and "Traceback" not in first + second and output.read_text() == "my notes\n"
    lines = [errors.splitlines(keepends=True)[-1] for errors in (first, second)]
    assert ranks[0].returncode == 2 and lines[0].startswith(f"batch.py: {output} holds something")
    assert ranks[1].returncode == 1 and LOST.fullmatch(lines[1])


def test_a_run_begun_with_other_flags_model_or_input_is_refused(job: Job) -> None:
    job.give(*prompts(4))
    job.model = job.folder / "model"
    save_hugging_face(tiny_model(), job.model, dtype=torch.float32)
    assert job.code() == 0
    before = job.output.read_bytes()
    assert "was begun with temperature 0.0, not 0.5" in job.refusal("--temperature", "0.5")
    assert "was begun with gamma 2, not 3" in job.refusal("--gamma", "3")
    assert "was begun with order input, not finished" in job.refusal("--order", "finished")
    other = write_lines(job.folder / "other.jsonl", prompts(5))
    assert "was begun with another input: name another output, or begin anew with --fresh" in job.refusal(source=other)
    another = job.folder / "another"
    save_hugging_face(tiny_model(seed=1), another, dtype=torch.bfloat16)
    assert "was begun with model" in job.refusal(model=another)
    assert job.output.read_bytes() == before
    assert job.code("--threads", 1) == 0  # of no consequence
    save_hugging_face(tiny_model(seed=1), job.model, dtype=torch.float32)  # of the same size
    assert "was begun with model files" in job.refusal()
    assert job.code("--fresh", "--gamma", 3, source=other) == 0 and job.places == [*range(5)]


def test_a_run_begun_before_a_flag_existed_continues_with_its_default(job: Job) -> None:
    job.give(*prompts(2))
    assert job.code() == 0
    path = job.folder / "out.state.json"
    state = json.loads(path.read_text())
    older = {name: value for name, value in state.items() if name not in journal.LATER}
    assert len(older) == len(state) - 4
    path.write_text(json.dumps(older))
    assert job.code() == 0
    assert "was begun with n_sink 4, not 8" in job.refusal("--n-sink", 8)
    del older["parse_special"]  # special tokens were read at that time
    path.write_text(json.dumps(older))
    assert "was begun with parse_special True, not False" in job.refusal()
    assert job.code("--parse-special") == 0


def test_gguf_models_are_told_apart_by_pages_of_all_parts(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(batch, "BEGINNING", 1 << 21)
    paths, size = [tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2)], 5 << 20
    for path in paths:
        path.write_bytes(bytes(size))
    first = batch.fingerprint_of_model(paths[0])
    assert set(first["weights"]) == {path.name for path in paths}
    assert batch.fingerprint_of_model(paths[1])["weights"] == first["weights"]  # whichever part is named
    # a header may be larger than a MiB; the last byte; a change of weights reaches far: one tensor of another kind
    changes = [(at, 1) for at in (0, (2 << 20) - 1, size - 1)] + [(at, 1 << 19) for at in range(0, size, 1 << 18)]
    for path in paths:
        for at, n in changes:
            data = bytearray(size)
            data[at : at + n] = bytes([1]) * len(data[at : at + n])
            path.write_bytes(data)
            assert batch.fingerprint_of_model(paths[0]) != first, (path.name, at)
        path.write_bytes(bytes(size))
    assert batch.fingerprint_of_model(paths[0]) == first


def test_a_file_of_another_program_is_left_alone(job: Job) -> None:
    job.give(*prompts(2))
    job.output.write_text("my notes\n")
    assert "holds something, and no out.state.json says what made it" in job.refusal()
    assert job.output.read_text() == "my notes\n"
    state = job.folder / "out.state.json"
    for damaged in ("[" * 100_000, "{", "[1]", '{"input": 1' + "0" * 5000 + "}"):
        state.write_text(damaged)
        assert "out.state.json is damaged" in job.refusal()
    state.unlink()
    job.output.unlink()
    assert job.code() == 0
    job.output.write_text(job.output.read_text() + "my notes\n")
    assert "line 3 was not written by this program" in job.refusal()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda one, two: one[:30] + two, "line 1 was not written by this program, or is damaged"),  # run together
        (lambda one, two: one + two[:-3] + b"\n", "line 2 was not written by this program, or is damaged"),
        (lambda one, two: one + one, "line 2 has index 0, which an earlier line has"),
        (lambda one, two: one + two.replace(b'"index": 1', b'"index": 7'), "has index 7, and the input 2 lines"),
        (lambda one, two: one + two.replace(b'"index": 1', b'"index": true'), "line 2 was not written by this"),
        (lambda one, two: one + two.replace(b'"index": 1', b'"index": -1'), "line 2 was not written by this"),
        (lambda one, two: one + b"[" * 100_000 + b"\n", "line 2 was not written by this"),
    ],
)
def test_damaged_or_doubled_lines_are_never_done(job: Job, damage: Callable[[bytes, bytes], bytes], said: str) -> None:
    job.give(*prompts(2))
    assert job.code() == 0
    damaged = damage(*job.output.read_bytes().splitlines(keepends=True))
    job.output.write_bytes(damaged)
    assert said in job.refusal()
    assert job.output.read_bytes() == damaged


@pytest.mark.parametrize(("last", "name"), [({"tokens": [1, 2]}, "out.jsonl"), ("{bad", "out.rejects.jsonl")])
def test_a_disk_that_stays_full_is_one_sentence(job: Job, monkeypatch: Patch, last: Any, name: str) -> None:
    """What closed the output tried again, and its error took the place of the sentence."""

    def full(self: journal.Log) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(self.path))

    job.give(*prompts(1), last)
    with monkeypatch.context() as within:
        within.setattr(journal.Log, "sync", full)
        within.setattr(journal, "SYNC", -1.0)
        assert job.code() == 1
    said = f"batch.py: {job.folder / name}: No space left on device; the same command goes on from here"
    assert job.capsys.readouterr().err.splitlines()[-1] == said
    assert job.code() == (4 if last == "{bad" else 0)


def test_two_processes_share_neither_an_output_nor_a_file_of_rejects(job: Job) -> None:
    """Both had index 1 among the rejects, which ended one of them in the middle of its work."""
    rejects = job.folder / "rejects.jsonl"
    job.give(*prompts(1), "{bad")
    log = journal.Log(job.output).open()
    assert "is being written by another process" in job.refusal("--fresh")
    log.close()
    log = journal.Log(job.folder / "other.jsonl", other=rejects)
    said = job.refusal("--rejects", rejects)
    assert said == f"batch.py: {rejects} is being written by another process: wait for it, or end it"
    log.close()
    assert not rejects.exists()
    assert job.code("--rejects", rejects) == 4
    assert [record["index"] for record in read_lines(rejects)] == [1]


@pytest.mark.parametrize("before", ["nothing", "a job that --fresh would forget"])
@pytest.mark.parametrize("wrong", ["no weights", "a layer too many"])
def test_what_is_refused_changes_and_leaves_no_file(job: Job, wrong: str, before: str) -> None:
    """An empty output and a state were left, and what it had held was gone before there was an engine."""
    job.give(*prompts(3))
    if before == "nothing":
        journal.lock_of(job.output).touch()  # stays: another process may be about to take it
    else:
        assert job.code() == 0
    files = {path: path.read_bytes() for path in job.folder.iterdir()}
    if wrong == "no weights":
        (empty := job.folder / "model").mkdir()
        (empty / "config.json").write_bytes((job.model / "config.json").read_bytes())
        assert "has no weights" in job.refusal("--fresh", model=empty)
    else:
        assert "below the model's 2 layers" in job.refusal("--fresh", "--draft", "early_exit", "--exit-layers", 2)
    assert {path: path.read_bytes() for path in job.folder.iterdir() if path.is_file()} == files


# ---- the pieces ------------------------------------------------------------------------------------------------------


def test_done_is_what_its_own_files_and_the_whole_ones_hold(tmp_path: Path) -> None:
    files = journal.Files(tmp_path / "out.jsonl", tmp_path / "out.rejects.jsonl", 1, 2)
    lines = {files.output: [0, 1], files.mine(files.output): [5, 3], files.mine(files.rejects): [7, 11]}
    lines |= {files.parts(files.output)[0]: [4, 9]}  # another replica's part, which may be half written
    for path, indices in lines.items():
        write_lines(path, [{"index": i, "id": None} for i in indices])
    with files.mine(files.output).open("ab") as file:
        file.write(b'{"index": 9, "id"')
    assert np.flatnonzero(files.done(12)).tolist() == [1, 3, 5, 7, 11]


@pytest.mark.parametrize("content", [b"", b"torn", b"one\n", b"one\ntwo\n", b"one\ntwo", b"one\n" + b"x" * 200_000])
def test_a_torn_line_is_cut_and_whole_ones_stay(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    journal.cut_torn_line(path)
    assert path.read_bytes() == content[: content.rfind(b"\n") + 1]


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("is_complete", [True, False])
def test_parts_become_one_file_even_if_a_merge_was_killed_that_which_a_link_names(
    tmp_path: Path, ordered: bool, is_complete: bool, linked: bool
) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    if linked:
        (elsewhere / "real.jsonl").touch()
        (tmp_path / "out.jsonl").symlink_to(elsewhere / "real.jsonl")
    files = journal.Files(tmp_path / "out.jsonl", tmp_path / "out.rejects.jsonl", 0, 2)
    parts = [[0, 4, 2], [1, 5, 3]] if not ordered else [[0, 2, 4], [1, 3, 5]]
    for path, indices in zip(files.parts(files.output), parts, strict=True):
        write_lines(path, [{"index": i, "id": None} for i in indices])
    write_lines(files.parts(files.rejects)[1], [{"index": 7, "line": 8}])
    if is_complete:  # killed between the last rename and the removal of the parts
        write_lines(files.output, [{"index": i, "id": None} for i in range(6)])
    files.merge(ordered=ordered)
    found = [r["index"] for r in read_lines(files.output)]
    assert sorted(found) == list(range(6)) and (found == sorted(found) or not ordered)
    assert [r["index"] for r in read_lines(files.rejects)] == [7]
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "out.jsonl", "out.rejects.jsonl"}
    assert files.output.is_symlink() is linked
    assert [path.name for path in elsewhere.iterdir()] == ["real.jsonl"] * linked


def test_replicas_share_the_lines_and_skip_blank_ones(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", ["a", "b", "", "d", "e"])
    shares = [batch.Share(source, rank, 2) for rank in (0, 1)]
    assert [list(share.lines()) for share in shares] == [[(0, b"a"), (4, b"e")], [(1, b"b"), (3, b"d")]]
    assert [len(share) for share in shares] == [2, 2]
