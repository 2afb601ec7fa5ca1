"""The kernels' own bodies pass the tests of this folder in Triton's interpreter, in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpt_fast_sd.fast.test_interpreted import needs_interpreter, run_interpreted


@needs_interpreter
@pytest.mark.slow
def test_kernels_pass_as_they_do_on_a_chip() -> None:
    run_interpreted(Path(__file__).with_name("test_kernels.py"), "not gpu")
