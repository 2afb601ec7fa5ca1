"""Libraries in Inductor's cache that cannot be loaded are built again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpt_fast_sd.fast import rebuilding
from gpt_fast_sd.fast.compile import can_compile
from gpt_fast_sd.fast.cpu import build as cpu_build

TORN = ["file too short", "invalid ELF header", "cannot read file data: Error 21"]


def cache_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


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
    cache = cache_in(monkeypatch, tmp_path)
    files = [cache / "a.main.so", cache / "b.so"]
    for file in files:
        file.touch()
    assert rebuilding(loading(*files, why=why)) == "loaded"
    assert all(file.read_text() == "built" for file in files)


def test_nothing_else_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_in(monkeypatch, tmp_path / "cache")
    (outside := tmp_path / "libc.so").touch()
    with pytest.raises(ImportError, match="file too short"):
        rebuilding(loading(outside))
    (inside := tmp_path / "cache" / "a.so").parent.mkdir(exist_ok=True)
    inside.touch()
    for why in ("undefined symbol: x", "cannot open shared object file"):
        with pytest.raises(ImportError, match=why):
            rebuilding(loading(inside, why=why))
    assert outside.exists() and inside.exists()

    def always() -> None:
        raise OSError(f"{inside}: file too short")

    with pytest.raises(OSError, match="file too short"):  # removed once, and torn again
        rebuilding(always)


@pytest.mark.slow  # three processes that compile
def test_a_run_goes_on_although_a_library_in_the_cache_is_torn(tmp_path: Path) -> None:
    """As after a process that was killed while it linked: every later one failed."""
    if not can_compile(torch.device("cpu")):
        pytest.skip("there is no C++ compiler")
    program = (
        "import torch\nfrom gpt_fast_sd.fast.compile import CompiledStep\nfrom gpt_fast_sd.fast import vector_options\n"
    )
    program += "def step(x):\n    return (x * 3.25 + 1).sin().sum()\n"
    program += "print(float(CompiledStep(step, dict(vector_options()))(torch.arange(100.0))))\n"
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    expected = {run(), run()}  # the second finds what the first built
    for library in tmp_path.rglob("*.so"):
        library.write_bytes(b"")
    assert {run()} == expected
    assert any(library.stat().st_size for library in tmp_path.rglob("*.so"))


def test_a_compiler_that_knows_the_syntax_and_fails_is_one_sentence(
    tmp_path: Path,
) -> None:
    from torch._inductor.exc import CppCompileError

    (source := tmp_path / "seven.cpp").write_text("")

    def fails() -> None:
        raise CppCompileError(["c++", "seven.cpp"], "{standard input}: Error: no such instruction: vfmadd231ps\nmore")

    with pytest.raises(OSError, match=r"fails to build seven\.cpp.*compile=False.*Error: no such instruction: vfmadd"):
        cpu_build._built(source, fails)
