"""A chat template gets its own answer, whatever else is asked, and leaves no process behind."""

import copy
import inspect
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

from gpt_fast_sd.model.files import chat_template as templating

Template, TemplateError = templating.Template, templating.TemplateError

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ECHO = "{% if messages[0].content == 'endless' %}" + ENDLESS + "{% endif %}{{ bos }}{{ messages[0].content }}"

on_linux = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads /proc")


def echo() -> Template:
    return Template(ECHO, {"bos": ">"})


def say(text: object) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(text)}]


def children() -> list[int]:
    """Processes that this one started and has not waited for."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def run(program: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, which has the helpers above."""
    given = f"""
import os, signal, sys, threading
from pathlib import Path
sys.path.insert(0, {str(Path(templating.__file__).parent)!r})
import chat_template as templating
from chat_template import Template
del sys.path[0]
ECHO = {ECHO!r}
"""
    source = "\n".join([given, *map(inspect.getsource, (echo, say, children)), textwrap.dedent(program)])
    command = [sys.executable, "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, start_new_session=True)


def test_threads_that_share_a_template_get_their_own_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("elsewhere"), b"bytes"])  # of other kinds: passed over
    template = echo()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda n: template.render(say(n)), range(400))) == [f">{n}" for n in range(400)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_has_a_process_of_its_own_and_leaves_its_parents_alone() -> None:
    program = """
        template = echo()
        template.render(say("first"))
        busy = threading.Thread(target=lambda: [template.render(say(n)) for n in range(200)])
        busy.start()  # so that the fork happens inside an exchange
        child = os.fork()
        who = "parent" if child else "child"
        for n in range(100):
            assert template.render(say(f"{who} {n}")) == f">{who} {n}"
        if not child:
            sys.exit()  # and what it runs at its exit
        assert os.waitpid(child, 0)[1] == 0
        busy.join()
        print(template.render(say("last")))
    """
    done = run(program)
    assert (done.stdout, done.stderr, done.returncode) == (">last\n", "", 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals")
def test_an_exception_while_waiting_for_an_answer_leaves_none_for_the_next(error: type[BaseException]) -> None:
    template = Template("{% for a in range(9999) %}{% for b in range(99) %}{% endfor %}{% endfor %}" + ECHO, {})
    template.render(say("started"))

    def handler(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        with pytest.raises(error):
            template.render(say("one"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert template.render(say("two")) == "two"


def test_an_answer_to_another_question_is_none() -> None:
    template = echo()
    template.render(say("started"))
    (renderer,) = template._renderers.values()
    assert renderer._process and renderer._process.stdin
    renderer._process.stdin.write(b'0 [{"content": "an answer too many"}]\n')
    with pytest.raises(TemplateError, match="broke down"):
        template.render(say("one"))
    assert template.render(say("two")) == ">two"


@on_linux
def test_ctrl_c_does_not_reach_the_process() -> None:
    program = """
        signal.signal(signal.SIGINT, lambda *_: None)
        template = echo()
        template.render(say("first"))
        before = children()
        os.killpg(0, signal.SIGINT)
        print(template.render(say("next")), children() == before)
    """
    done = run(program)
    assert done.stdout == ">next True\n", done.stderr


@on_linux
def test_a_process_that_was_ended_is_started_again() -> None:
    before, template = set(children()), echo()
    template.render(say("first"))
    (pid,) = {*children()} - before
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert template.render(say("next")) == ">next"


@on_linux
def test_what_took_too_long_leaves_no_process_and_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    template = echo()
    monkeypatch.setattr(templating, "SECONDS", 0.3)
    processes, descriptors = sorted(children()), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(TemplateError, match="it takes more than "):
            template.render(say("endless"))
    assert (sorted(children()), len(os.listdir("/proc/self/fd"))) == (processes, descriptors)


@on_linux
def test_the_process_ends_though_the_one_that_asked_was_killed() -> None:
    program = """
        templating.SECONDS = 2.0
        template = echo()
        template.render(say("first"))
        print(*children(), flush=True)
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        template.render(say("endless"))
    """
    pid = int(run(program).stdout)
    for _ in range(200):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it runs on")


@pytest.mark.parametrize("own", [None, "", "/usr/bin/uwsgi"])
def test_where_a_program_embeds_python_the_one_beside_it_renders(own: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "executable", own)
    assert echo().render(say("fine")) == ">fine"
    for name in ("prefix", "base_prefix") if own else ("frozen",):
        monkeypatch.setattr(sys, name, "/none", raising=False)
    with pytest.raises(TemplateError, match="no process can be started for it: this program has no Python interpreter"):
        echo().render(say("fine"))


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_start_takes_no_longer_than_a_text_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = tmp_path / "python"
    never.write_text("#!/bin/sh\nexec sleep 30\n")
    never.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(never))
    monkeypatch.setattr(templating, "SECONDS", 0.3)
    with pytest.raises(TemplateError, match="it takes more than "):
        Template("x" * 500_000, {}).render(say("more than a pipe holds"))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda template: pickle.loads(pickle.dumps(template))])
def test_a_template_in_use_can_be_copied_and_pickled(again: Any) -> None:
    template = echo()
    template.render(say("first"))
    assert (again(template).render(say("two")), template.render(say("one"))) == (">two", ">one")
