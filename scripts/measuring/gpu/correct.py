"""Is it right? The tests of tests/gpu, as a stage: what passed on these sources and this device is not run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from measuring.gpu.setup import ROOT, Record, Setup, tree_of
from measuring.ledger import write_whole

SAID = 2000  # characters of what a test said that failed


class Outcomes:
    """A plugin of pytest that leaves out what has passed, and has each outcome on the disk as soon as it is known.

    A test that ends its process, or with which the process is ended, is there as one that did not end.
    """

    def __init__(self, path: Path, on: Record) -> None:
        """on: what must not have changed since a test has passed."""
        self.path, self.on, self.wanted = path, on, list[str]()
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.tests: dict[str, Record] = old["tests"] if old.get("on") == on else {}

    def has_passed(self, test: str) -> bool:
        """Whether it need not be run again."""
        return self.tests.get(test, {}).get("outcome") == "passed"

    def note(self, test: str, **what: object) -> None:
        """What a test came to, on the disk when this returns."""
        self.tests[test] = what
        write_whole(self.path, json.dumps({"on": self.on, "tests": self.tests}, indent=1) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Of what the markers have left: those that have failed before come last, those that have passed do not."""
        self.wanted = [item.nodeid for item in items]
        config.hook.pytest_deselected(items=[item for item in items if self.has_passed(item.nodeid)])
        items[:] = [item for item in items if not self.has_passed(item.nodeid)]
        items.sort(key=lambda item: item.nodeid in self.tests)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.note(nodeid, outcome="did not end")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has run, or was skipped or failed before or after."""
        if report.when == "call" or not report.passed:
            seen = {key: value for key, value in report.user_properties}
            said = "" if report.passed else report.longreprtext[-SAID:]
            self.note(report.nodeid, outcome=report.outcome, seconds=report.duration, seen=seen, said=said)


def run_tests(setup: Setup, name: str) -> Record:
    """Run a file of tests/gpu -> what every test of it came to, in this run or an earlier one.

    On CUDA the tests that are marked so; in a dry run the same ones, small, on the CPU.
    """
    device = torch.cuda.get_device_name(setup.device) if setup.on_cuda else "cpu"
    outcomes = Outcomes(setup.out / "tests.json", {"tree": tree_of(), "device": device})
    file, config = ROOT / "tests" / "gpu" / name, ROOT / "pyproject.toml"
    marked = "gpu" if setup.on_cuda else "not gpu"
    # not captured: the traceback of a test that takes too long is written as the process ends
    options = ["-s", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "-c", str(config), "-m", marked, str(file)]
    code = pytest.main(options, plugins=[outcomes])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"pytest ended with {code!r}")
    tests = {test.rpartition("/")[2]: outcomes.tests.get(test, {"outcome": "not run"}) for test in outcomes.wanted}
    if not tests:
        raise RuntimeError(f"{name} holds no tests for {device}")
    return {"ok": all(map(outcomes.has_passed, outcomes.wanted)), "tree": tree_of(), "tests": tests}
