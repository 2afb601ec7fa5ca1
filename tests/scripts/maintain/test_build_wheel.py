"""build_wheel.py makes a wheel that runs without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpt_fast_sd.fast import chosen, packing_builds
from maintain import build_wheel


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
        "assert not engine.compiled and engine.target.uses_kernels and engine.dtype_name == 'bf16'\n"
        "print(engine.generate(['a'])[0].text)\n"
    )
    env = {"PYTHONPATH": str(tmp_path / "site"), "GPT_FAST_SD_CPU": name, "PATH": str(Path(sys.executable).parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "running eagerly" in done.stderr
