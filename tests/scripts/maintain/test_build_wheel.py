"""build_wheel.py: what it refuses, and a wheel that runs without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpt_fast_sd.fast import chosen, packing_builds
from maintain import build_wheel


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--sets", "avx3"], "--sets avx3: CPUs of this kind have "),
     (["--head-dims", "72"], "--head-dims 72: allowed are"),
     (["--head-dims", "64", "512"], "--head-dims 512: allowed are multiples of 16 up to 256")],
)  # fmt: skip
def test_what_it_cannot_build_is_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        build_wheel.main(argv)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(build_wheel, "build_kernel", None)
    for folder, said in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "dist", "Not a directory")):
        with pytest.raises(SystemExit) as ended:
            build_wheel.main(["--dist", str(folder)])
        assert ended.value.code == 2 and f"--dist {folder}: {said}" in capsys.readouterr().err


@pytest.mark.slow
def test_its_wheel_decodes_by_kernels_where_there_is_no_compiler(tmp_path: Path) -> None:
    if not packing_builds() or os.name != "posix":
        pytest.skip("no compiler here builds the kernels")
    name = chosen().name if not chosen().own else "avx2"
    (tmp_path / "gpt_fast_sd-0.0.1-py3-none-any.whl").write_text("of another version")
    assert build_wheel.main(["--dist", str(tmp_path), "--head-dims", "64", "--sets", name]) == 0
    (built,) = (file for file in tmp_path.glob("*.whl") if "0.0.1" not in file.name)
    shutil.unpack_archive(built, tmp_path / "site", "zip")
    code = (
        "from gpt_fast_sd import Engine, EngineConfig\n"
        "engine = Engine.from_pretrained('bundled', EngineConfig(max_seq_len=256, batch_size=1))\n"
        "assert not engine.compiled and engine.dtype_name == 'bf16'\n"
        "assert engine.target.backend.uses_kernels(engine.target)\n"
        "print(engine.generate(['a'])[0].text)\n"
    )
    env = {"PYTHONPATH": str(tmp_path / "site"), "GPT_FAST_SD_CPU": name, "PATH": str(Path(sys.executable).parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "running eagerly" in done.stderr
