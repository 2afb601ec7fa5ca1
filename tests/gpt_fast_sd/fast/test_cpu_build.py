"""Kernels that were built beforehand are found and used if they are of this very text; what is torn is built again."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor import cpp_builder

from gpt_fast_sd import DraftConfig, Engine, SamplingParams
from gpt_fast_sd import fast as kernels
from gpt_fast_sd.fast.compile import can_compile
from gpt_fast_sd.fast.cpu import attention_cpp as cpu
from gpt_fast_sd.fast.cpu import build as cpu_build
from gpt_fast_sd.fast.cpu import instruction_sets as cpu_sets
from gpt_fast_sd.fast.cpu import prebuild as beforehand
from tests.gpt_fast_sd.fast.test_cpu import asked_anew, forget  # noqa: F401  a fixture
from tests.gpt_fast_sd.policies.drafting import tokens_of
from tests.helpers import random_ids, tiny_config, tiny_engine, tiny_model

HEAD_DIM = 16


@pytest.fixture(scope="module")
def of_a_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """AVX2 or this CPU's plainest set, and a folder with the kernels that a wheel has for it, of 16 dims."""
    if not kernels.packing_builds():
        pytest.skip("no compiler here builds the kernels")
    here, folder = {one.name for one in cpu_sets.sets_here()}, tmp_path_factory.mktemp("wheel")
    name = next(name for name in ("avx2", "neon", "plain") if name in here)
    for job in kernels.kernels_to_build([kernels.sets_of_this_kind()[name]], [HEAD_DIM]):
        assert kernels.build_kernel(job, folder).parent == folder / "built"
    return name, folder / "built"


@pytest.fixture
def built(of_a_wheel: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a copy of those kernels, which are found there."""
    name, whole = of_a_wheel
    folder = shutil.copytree(whole, tmp_path / "built")
    for module in (cpu_build, beforehand):
        monkeypatch.setattr(module, "BUILT", folder)
    monkeypatch.setenv(cpu_sets.VARIABLE, name)
    forget()
    yield folder
    monkeypatch.undo()
    forget()


def generated(dtype: torch.dtype) -> tuple[Engine, list[list[int]]]:
    model = tiny_model(tiny_config(dim=64, head_dim=HEAD_DIM, ffn_dim=96), dtype=dtype)
    engine = tiny_engine(DraftConfig(policy="streaming", budget=64, gamma=3), model=model)
    return engine, said_by(engine)


def said_by(engine: Engine) -> list[list[int]]:
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    return tokens_of(engine.generate([random_ids(300), random_ids(40, seed=1)], params))


def test_eager_steps_use_what_is_built_and_say_the_same(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, kernel = [], cpu.kernel_for
    monkeypatch.setattr(cpu, "kernel_for", lambda *of: calls.append(of) or kernel(*of))
    engine, tokens = generated(torch.float32)
    assert kernels.kernels_are_built(HEAD_DIM, torch.float32)
    assert engine.target.backend.uses_kernels(engine.target) and calls
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
    assert said_by(engine) == tokens


def test_a_compiler_is_asked_once_if_it_knows_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, asked = tmp_path / "c++", tmp_path / "asked"
    compiler.write_text(f"#!/bin/sh\ncat > {os.devnull}\necho >> {asked}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda *_: str(compiler))

    def times(head_dim: int = HEAD_DIM) -> int:
        cpu_build.builds.cache_clear()  # as another process
        assert cpu_build.builds(cpu.ANY, head_dim)
        return len(asked.read_text().splitlines())

    assert [times(), times(), times(32), times()] == [1, 1, 2, 2]
    compiler.write_text(compiler.read_text() + "true\n")
    assert [times(), times()] == [3, 3]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiler))  # a file, where nothing can be noted
    assert [times(), times()] == [4, 5]
    cpu_build.builds.cache_clear()


def test_what_was_built_of_another_text_is_left_alone(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.kernels_are_built(HEAD_DIM, torch.float32)
    text = cpu_build.text
    monkeypatch.setattr(cpu_build, "text", lambda *of: text(*of) + "// changed\n")
    cpu_build.is_built.cache_clear()
    assert not kernels.kernels_are_built(HEAD_DIM, torch.float32)


@pytest.mark.parametrize("text", [b"", b"no library", b"\x7fELF" + bytes(60)])
def test_a_library_that_cannot_be_loaded_is_a_warning(built: Path, text: bytes) -> None:
    for file in built.iterdir():
        file.unlink()
        file.write_bytes(text)
    cpu_build.is_built.cache_clear()
    with pytest.warns(UserWarning, match="cannot be loaded and is not used"):
        assert not kernels.kernels_are_built(HEAD_DIM, torch.float32)
    target = generated(torch.float32)[0].target
    assert target.backend.uses_kernels(target) is False


@pytest.mark.usefixtures("asked_anew")
def test_without_them_nothing_runs_eagerly_by_kernels() -> None:
    sizes = (64, torch.bfloat16), (72, torch.float32), (512, torch.float32), (64, torch.float64)
    assert not any(kernels.kernels_are_built(*size) for size in sizes), "a checkout has none"
    target = generated(torch.float32)[0].target
    assert target.backend.uses_kernels(target) is False


def test_kernels_for_any_cpu_are_built_once_for_all_of_avx512() -> None:
    jobs = list(kernels.kernels_to_build(list(kernels.sets_of_this_kind().values()), [64, 80]))
    assert len({(job.source, job.head_dim, job.march) for job in jobs}) == len(jobs)
    if cpu_sets.IS_X86:
        marches = {job.march for job in jobs if job.source == cpu.ANY}
        assert marches == {"skylake-avx512", "haswell", "x86-64"}
        assert {job.march for job in jobs if job.source == cpu.SOURCE} == {"sapphirerapids", "cooperlake"}


def test_a_compiler_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.packing_builds():
        pytest.skip("no compiler here builds the kernels")
    job = next(kernels.kernels_to_build(list(kernels.sets_of_this_kind().values())[-1:], [64]))
    monkeypatch.setattr(beforehand, "text", lambda *_: "#error nothing here\n")
    with pytest.raises(ValueError, match=r"cannot build attention\.cpp for plain: .*nothing here"):
        kernels.build_kernel(job, tmp_path)


# ---- libraries in Inductor's cache that cannot be loaded -----------------------------------------------------------

TORN = ["file too short", "invalid ELF header", "cannot read file data: Error 21"]


def loading(*files: Path, why: str = TORN[0]) -> Callable[[], str]:
    """Load libraries, of which none may be empty."""

    def load() -> str:
        for file in files:
            if not file.exists():
                file.write_text("built")
            if not file.read_text():
                raise ImportError(f"{file}: {why}")
        return "loaded"

    return load


@pytest.mark.parametrize("why", TORN)
def test_torn_libraries_are_removed_and_built_again(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    files = [tmp_path / "a.main.so", tmp_path / "b.so"]
    for file in files:
        file.touch()
    assert kernels.rebuilding(loading(*files, why=why)) == "loaded"
    assert all(file.read_text() == "built" for file in files)


def test_nothing_else_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (outside := tmp_path / "libc.so").touch()
    with pytest.raises(ImportError, match="file too short"):
        kernels.rebuilding(loading(outside))
    (inside := tmp_path / "cache" / "a.so").parent.mkdir(exist_ok=True)
    inside.touch()
    for why in ("undefined symbol: x", "cannot open shared object file"):
        with pytest.raises(ImportError, match=why):
            kernels.rebuilding(loading(inside, why=why))
    assert outside.exists() and inside.exists()

    def always() -> None:
        raise OSError(f"{inside}: file too short")

    with pytest.raises(OSError, match="file too short"):  # removed once, and torn again
        kernels.rebuilding(always)


@pytest.mark.slow  # three processes that compile
def test_a_run_goes_on_although_a_library_in_the_cache_is_torn(tmp_path: Path) -> None:
    """As after a process that was killed while it linked: every later one failed."""
    if not can_compile(torch.device("cpu")):
        pytest.skip("there is no C++ compiler")
    code = """if True:
        import torch
        from gpt_fast_sd.fast import vector_options
        from gpt_fast_sd.fast.compile import CompiledStep
        def step(x):
            return (x * 3.25 + 1).sin().sum()
        print(float(CompiledStep(step, dict(vector_options()))(torch.arange(100.0))))
    """
    program = [sys.executable, "-c", code]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run() -> str:
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    expected = {run(), run()}  # the second finds what the first built
    for library in tmp_path.rglob("*.so"):
        library.write_bytes(b"")
    assert {run()} == expected
    assert any(library.stat().st_size for library in tmp_path.rglob("*.so"))


def test_a_compiler_that_knows_the_syntax_and_fails_is_one_sentence(tmp_path: Path) -> None:
    from torch._inductor.exc import CppCompileError

    (source := tmp_path / "seven.cpp").write_text("")

    def fails() -> None:
        raise CppCompileError(["c++", "seven.cpp"], "{standard input}: Error: no such instruction: vfmadd231ps\nmore")

    with pytest.raises(OSError, match=r"fails to build seven\.cpp.*compile=False.*Error: no such instruction: vfmadd"):
        cpu_build._built(source, fails)
