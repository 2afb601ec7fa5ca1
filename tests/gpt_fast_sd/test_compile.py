"""Compiled steps: one graph each for all lengths, the tokens of the eager ones, and a fallback without a compiler."""

import errno
import gc
import io
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from gpt_fast_sd import Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast.compile import CompiledStep
from gpt_fast_sd.model import ModelConfig
from tests.helpers import random_ids, tiny_config, tiny_engine, tiny_model

pytestmark = pytest.mark.usefixtures("a_compiler")
LENGTHS = [1, 2, 40, 255, 257, 600, 5900]  # up to 24 chunks and splits, over Inductor's 4096
PROMPTS = [random_ids(n, seed=n) for n in LENGTHS]
PARAMS = [
    SamplingParams(max_tokens=4 + i, seed=i, temperature=[0.0, 1.0][i % 2], top_p=0.9 if i % 4 == 3 else None)
    for i in range(len(PROMPTS))
]
# One layer, G = 4 (its decode step takes another body of attention), and no more splits than are always in view.
SMALL = tiny_config(n_layers=1, n_heads=8, max_seq_len=300)


def make(config: ModelConfig, *, compile: bool, batch_size: int = 3) -> Engine:
    settings = {"batch_size": batch_size, "max_seq_len": config.max_seq_len}
    return tiny_engine(model=tiny_model(config), compile=compile, **settings)


def warning_of_an_eager_run() -> str:
    """The one warning of an engine that was to compile, runs eagerly and gets the tokens of one that is."""
    with pytest.warns(UserWarning) as caught:
        one = make(SMALL, compile=True)
        got = tokens(one, upto=40)
    (warning,) = caught
    assert graphs(one) == (0, 0)
    assert got == tokens(make(SMALL, compile=False), upto=40)
    return str(warning.message)


def tokens(engine: Engine, upto: int = 10**9) -> list[list[int]]:
    """What every prompt of at most `upto` tokens is continued with."""
    chosen = [i for i, n in enumerate(LENGTHS) if n <= upto]
    return [c.tokens for c in engine.generate([PROMPTS[i] for i in chosen], [PARAMS[i] for i in chosen])]


def graphs(engine: Engine) -> tuple[int, int]:
    return engine._prefill.graphs, engine.schedule.rounds.decode.graphs


def test_without_a_compiler_one_warning_names_the_line_and_all_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: Any) -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", no_compiler)
    model, config = tiny_model(SMALL), EngineConfig(max_seq_len=300, device="cpu")
    with pytest.warns(UserWarning, match="needs a C\\+\\+ compiler") as warned:
        Engine(model, None, config)
    assert [one.filename for one in warned] == [__file__]
    assert "C++ compiler" in warning_of_an_eager_run()


def test_prompts_of_all_lengths_share_the_graphs_of_the_first_call() -> None:
    """Over 24 splits."""
    large = make(tiny_config(max_seq_len=6144), compile=True)
    assert graphs(large) == (0, 0)
    large.generate([[1]], SamplingParams(max_tokens=1))
    assert graphs(large) == (1, 1)
    took = large.stats.compile_seconds
    assert took > 0 and large.stats.recompiles == 0  # warming up does not count as a recompile
    got = tokens(large)
    assert large.stats.compile_seconds == took  # the engine's own, not the call's
    assert graphs(large) == (1, 1) and large.stats.recompiles == 0
    assert got == tokens(make(tiny_config(max_seq_len=6144), compile=False))
    assert len({token for row in got for token in row}) > 20


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'cc1plus: fatal error: no such pass' >&2; exit 1", "(cc1plus: fatal error: no such pass)"),
        ("exit 3", "(exit code 3)"),
    ],
)
def test_a_compiler_that_cannot_build_is_one_warning_and_the_engine_runs_eagerly(
    script: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It told its version, which was all that was asked, and a page of Dynamo's traceback ended the run later."""
    (broken := tmp_path / "c++").write_text(f"#!/bin/sh\n{script}\n")
    broken.chmod(0o755)
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda *_: str(broken))
    assert f"{broken} cannot build a module for Python {said}: running eagerly" in warning_of_an_eager_run()


def test_where_nothing_can_be_written_it_runs_eagerly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Full(io.BytesIO):
        def write(self, *_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: Full())
    assert f"{tmp_path} cannot hold what it builds: No space left on device" in warning_of_an_eager_run()


def test_a_cache_folder_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file))
    with pytest.raises(ValueError, match=f"TORCHINDUCTOR_CACHE_DIR is '{file}', which is no folder.*: File exists"):
        make(SMALL, compile=True)


def test_an_engine_that_is_not_to_compile_needs_no_compiler_and_no_build(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> bool:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr("gpt_fast_sd.fast.choose.round_builds", asked)
    with pytest.raises(AssertionError, match="asked for"):
        make(SMALL, compile=True)
    monkeypatch.delattr(cpp_builder, "get_cpp_compiler")
    assert len(tokens(make(SMALL, compile=False), upto=255)) == 4


@pytest.mark.parametrize("compile", [True, False])
def test_building_begins_before_weights_are_read(monkeypatch: pytest.MonkeyPatch, compile: bool) -> None:
    order: list[str] = []

    def read(*args: Any, **kwargs: Any) -> None:
        order.append("weights")
        raise ValueError("read")

    monkeypatch.setattr("gpt_fast_sd.loading.prepare.begin_building", lambda *sources, **_: order.append("build"))
    monkeypatch.setattr("gpt_fast_sd.tp.Group.load", read)
    with pytest.raises(ValueError, match="read"):
        Engine.from_pretrained("bundled", EngineConfig(device="cpu", max_seq_len=64, compile=compile))
    assert order == (["build", "weights"] if compile else ["weights"])


@pytest.mark.slow
def test_engines_of_growing_capacity_in_one_process_each_compile_once() -> None:
    """A third capacity once met a cached graph whose sizes Dynamo had made dynamic on its own, and refused to run."""
    for capacity in (600, 1100, 2100):
        one = make(tiny_config(max_seq_len=capacity), compile=True, batch_size=1)
        one.generate([[1] * n for n in (3, capacity // 2, capacity - 20)], SamplingParams(max_tokens=4))
        assert graphs(one) == (1, 1)
        assert one.stats.recompiles == 0


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_nothing_of_steps_that_were_dropped_is_kept() -> None:
    """Dynamo's result and the code that it was made of held each other: every change of the policy left its graphs."""
    codes = []
    for _ in range(3):
        step = CompiledStep(plus_one)
        assert step(torch.zeros(2)).tolist() == [1.0, 1.0] and step.graphs == 1
        codes.append(weakref.ref(step._codes[0]))
        del step
    gc.collect()
    assert sum(code() is not None for code in codes) <= 1  # torch may still refer to one of them
    assert sum(name.startswith("__compiled_fn") for name in globals()) <= 1


def test_a_step_that_goes_with_what_dynamo_resets_is_dropped_once() -> None:
    """Dropping the code that was being dropped ended the process, or hung in it."""

    class Held(CompiledStep):
        def _inductor(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            return lambda *args: (self, graph.forward(*args))[1]  # so that what is compiled holds the step

    step = Held(plus_one)
    assert step(torch.zeros(2)).tolist() == [1.0, 1.0]
    code = weakref.ref(step._codes[0])
    del step
    torch._dynamo.reset()
    CompiledStep(plus_one)
    gc.collect()
    assert code() is None
