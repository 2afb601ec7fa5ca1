"""Kernels that were built beforehand: found, used by steps that run eagerly, and only if they are of this very text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast import build_kernel, kernels_are_built, kernels_to_build, packing_builds, sets_of_this_kind
from gpt_fast_sd.fast.cpu import attention_cpp as cpu
from gpt_fast_sd.fast.cpu import build as cpu_build
from gpt_fast_sd.fast.cpu import instruction_sets as cpu_sets
from gpt_fast_sd.fast.cpu import prebuild as beforehand
from tests.gpt_fast_sd.fast.test_cpu import forget
from tests.helpers import random_ids, tiny_config, tiny_model

HEAD_DIM = 16


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What is known of built kernels is forgotten, before and after."""
    forget()
    yield
    forget()


@pytest.fixture
def built(tmp_path: Path, asked_anew: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the kernels that a wheel has for this CPU's plainest set and AVX2, of 16 dims."""
    if not packing_builds():
        pytest.skip("no compiler here builds the kernels")
    here = {one.name for one in cpu_sets.sets_here()}
    name = next(name for name in ("avx2", "neon", "plain") if name in here)
    folder: Path = tmp_path / "built"
    for job in kernels_to_build([sets_of_this_kind()[name]], [HEAD_DIM]):
        assert build_kernel(job, tmp_path).parent == folder
    for module in (cpu_build, beforehand):
        monkeypatch.setattr(module, "BUILT", folder)
    monkeypatch.setenv(cpu_sets.VARIABLE, name)
    forget()
    return folder


def generated(dtype: torch.dtype) -> tuple[Engine, list[list[int]]]:
    model = tiny_model(tiny_config(dim=64, n_heads=4, n_kv_heads=2, head_dim=HEAD_DIM, ffn_dim=96), dtype=dtype)
    config = EngineConfig(batch_size=2, max_seq_len=512, device="cpu", compile=False)
    engine = Engine(model, None, config, DraftConfig(policy="streaming", budget=64, gamma=3))
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    return engine, [one.tokens for one in engine.generate([random_ids(300), random_ids(40, seed=1)], params)]


def test_eager_steps_use_what_is_built_and_say_the_same(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = cpu.kernel_for
    monkeypatch.setattr(cpu, "kernel_for", lambda *of: calls.append(of) or kernel(*of))
    engine, tokens = generated(torch.float32)
    assert kernels_are_built(HEAD_DIM, torch.float32) and engine.target.backend.uses_kernels(engine.target) and calls
    for file in built.iterdir():
        file.unlink()
    cpu_build.is_built.cache_clear()
    calls.clear()
    engine, expected = generated(torch.float32)
    assert not engine.target.backend.uses_kernels(engine.target) and not calls and tokens == expected


def test_weights_are_packed_for_what_is_built(built: Path) -> None:
    engine, tokens = generated(torch.bfloat16)
    engine.redraft(DraftConfig())
    assert type(engine.target.model.layers[0].attention.wqkv).__name__ == "PackedLinear"
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    plain = engine.generate([random_ids(300), random_ids(40, seed=1)], params)
    assert [one.tokens for one in plain] == tokens


def test_what_was_built_of_another_text_is_left_alone(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_are_built(HEAD_DIM, torch.float32)
    text = cpu_build.text
    monkeypatch.setattr(cpu_build, "text", lambda *of: text(*of) + "// changed\n")
    cpu_build.is_built.cache_clear()
    assert not kernels_are_built(HEAD_DIM, torch.float32)


@pytest.mark.parametrize("text", [b"", b"no library", b"\x7fELF" + bytes(60)])
def test_a_library_that_cannot_be_loaded_is_a_warning(built: Path, text: bytes) -> None:
    for file in built.iterdir():
        file.unlink()
        file.write_bytes(text)
    cpu_build.is_built.cache_clear()
    with pytest.warns(UserWarning, match="cannot be loaded and is not used"):
        assert not kernels_are_built(HEAD_DIM, torch.float32)
    target = generated(torch.float32)[0].target
    assert target.backend.uses_kernels(target) is False


def test_without_them_nothing_runs_eagerly_by_kernels(asked_anew: None) -> None:
    sizes = (64, torch.bfloat16), (72, torch.float32), (512, torch.float32), (64, torch.float64)
    assert not any(kernels_are_built(*size) for size in sizes), "a checkout has none"
    target = generated(torch.float32)[0].target
    assert target.backend.uses_kernels(target) is False


def test_kernels_for_any_cpu_are_built_once_for_all_of_avx512() -> None:
    jobs = list(kernels_to_build(list(sets_of_this_kind().values()), [64, 80]))
    assert len({(job.source, job.head_dim, job.march) for job in jobs}) == len(jobs)
    if cpu_sets.IS_X86:
        marches = {job.march for job in jobs if job.source == cpu.ANY}
        assert marches == {"skylake-avx512", "haswell", "x86-64"}
        assert {job.march for job in jobs if job.source == cpu.SOURCE} == {"sapphirerapids", "cooperlake"}


def test_a_compiler_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not packing_builds():
        pytest.skip("no compiler here builds the kernels")
    job = next(kernels_to_build(list(sets_of_this_kind().values())[-1:], [64]))
    monkeypatch.setattr(beforehand, "text", lambda *_: "#error nothing here\n")
    with pytest.raises(ValueError, match=r"cannot build attention\.cpp for plain: .*nothing here"):
        build_kernel(job, tmp_path)
