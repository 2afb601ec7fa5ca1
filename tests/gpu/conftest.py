"""Is it right on the chip? Every test of this folder runs twice: small on the CPU, and as large as is real on CUDA.

    python -m pytest -m gpu                                        on a machine with a GPU: the second kind alone
    TRITON_INTERPRET=1 python -m pytest tests/gpu/test_kernels.py  the kernels' own bodies, interpreted on the CPU

An ordinary run has the first kind, so that no line here is executed only on CUDA. There are no graphs on a CPU:
tests.gpuless.pools stands in for them.
"""

import dataclasses
import faulthandler
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key
from torch._library.custom_ops import OPDEFS

from gpt_fast_sd.fast.devices import TRAITS
from gpt_fast_sd.tp import why_no_cuda
from tests.gpt_fast_sd.fast import references
from tests.gpu.place import INTERPRETED, Place

if INTERPRETED:
    import tests.gpuless.interpreter  # noqa: F401  before any kernel: it makes bf16 right

SECONDS = 120  # a test may take, if no marker says more

NO_CUDA = None if torch.cuda.is_available() else f"torch sees no CUDA device here: {why_no_cuda()}"
ON_CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_CUDA is not None, reason=str(NO_CUDA))])


@pytest.fixture(scope="module", params=["cpu", ON_CUDA])
def place(request: pytest.FixtureRequest) -> Place:
    """Where the test runs."""
    return Place(torch.device(request.param))


@pytest.fixture(scope="module")
def bodies(place: Place) -> Iterator[None]:
    """On a CPU operators have their references for bodies, or, interpreted, those of CUDA, as for sm_90."""
    with pytest.MonkeyPatch.context() as patch:
        if not place.on_cuda:
            references.as_on_cuda(patch)
        if INTERPRETED:
            from gpt_fast_sd.fast.triton import common as triton_common

            patch.setattr(triton_common, "architecture", lambda: 90)
            ours = (op for name, op in OPDEFS.items() if name.startswith("gpt_fast_sd::"))
            for bodies in (op._backend_fns for op in ours if "cuda" in op._backend_fns):
                patch.setitem(bodies, "cpu" if "cpu" in bodies else None, bodies["cuda"])
        yield


@pytest.fixture(scope="module")
def captures(place: Place) -> Iterator[None]:
    """Rounds are captured: as CUDA graphs, or by what stands in for them."""
    if place.on_cuda:
        yield
        return
    from tests.gpuless.pools import stand_in

    with pytest.MonkeyPatch.context() as patch, stand_in("2.13"):
        patch.setitem(TRAITS, "cpu", dataclasses.replace(TRAITS["cpu"], captures=True))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """On CUDA a test that takes too long ends the process, with a traceback: nothing else stops a kernel that hangs.

    There is one such timer in a process: this takes the place of pytest's own until the test is over.
    """
    if item.get_closest_marker("gpu") is not None:
        marker, shown = item.get_closest_marker("seconds"), item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(marker.args[0] if marker else SECONDS, exit=True, file=shown)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Nothing hangs any more."""
    if item.get_closest_marker("gpu") is not None:
        faulthandler.cancel_dump_traceback_later()


# ---- what has passed is not run again --------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of gpu_suite.py, which calls again until all has passed."""
    parser.addoption("--outcomes", metavar="FILE", help="keep what each test came to here; what passed is left out")
    parser.addoption("--outcomes-on", metavar="JSON", help="what must not have changed since a test has passed")


def pytest_configure(config: pytest.Config) -> None:
    """Let outcomes be kept where they are asked for."""
    if file := config.getoption("--outcomes", None):
        on = json.loads(config.getoption("--outcomes-on"))
        config.pluginmanager.register(Outcomes(Path(file), on, getattr(config, "workerinput", None)))


class Outcomes:
    """Leaves out what has passed, and has each outcome on the disk as soon as it is known.

    A test that ends its process, or with which the process is ended, is there as one that did not end, or among
    several processes (pytest -n) as failed. Of these the first alone writes, and tells the others what was so before.
    """

    def __init__(self, path: Path, on: Any, told: dict[str, Any] | None = None) -> None:
        """on: what must not have changed since a test has passed; told: what another process says, if it writes."""
        self.path, self.on, self.writes = path, on, told is None
        old = json.loads(path.read_text(encoding="utf-8")) if self.writes and path.exists() else {}
        self.tests: dict[str, dict[str, Any]] = old["tests"] if old.get("on") == on else {}
        before = {test: one["outcome"] for test, one in self.tests.items()}
        self.before: dict[str, str] = before if told is None else told["before"]

    def note(self, test: str, outcome: str, said: str = "", seen: object = ()) -> None:
        """What a test came to, on the disk when this returns."""
        self.tests[test] = {"outcome": outcome, "said": said, "seen": seen}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"on": self.on, "tests": self.tests}, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Another process is about to begin: it may be one that takes the place of one that ended."""
        node.workerinput["before"] = self.before

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """All processes collect the same."""
        self.expect(ids)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Of what the markers have left: those that have failed before come last, those that have passed do not."""
        passed = [item for item in items if self.before.get(item.nodeid) == "passed"]
        config.hook.pytest_deselected(items=passed)
        items[:] = [item for item in items if item not in passed]
        items.sort(key=lambda item: self.before.get(item.nodeid, "not run") != "not run")
        self.expect([item.nodeid for item in items])

    def expect(self, tests: list[str]) -> None:
        """Tests that will be run, unless something ends first."""
        for test in tests:
            self.tests.setdefault(test, {"outcome": "not run", "said": "", "seen": ()})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        if self.writes:
            self.note(nodeid, "did not end")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has run, or was skipped or failed before or after."""
        if self.writes and (report.when == "call" or not report.passed):
            said = "" if report.passed else report.longreprtext[-2000:]
            self.note(report.nodeid, report.outcome, said, [text for _, text in report.user_properties])
