"""A checkout and an installed copy are imported by the same names, and importing the package stays cheap."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpt_fast_sd
from gpt_fast_sd.fast import chosen, packing_builds
from maintain import build_wheel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = ("gguf", "tokenizers", "huggingface_hub", "tiktoken", "jinja2", "matplotlib", "transformers", "triton")


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_folders() -> dict[str, str]:
    """Folder of every package that the checkout holds -> the name it is installed by."""
    inits = [path.parent for room in ("gpt_fast_sd", "model", "tp") for path in (ROOT / room).rglob("__init__.py")]
    folders = sorted(path.relative_to(ROOT).as_posix() for path in inits)
    return {f: ("" if f.startswith("gpt_fast_sd") else "gpt_fast_sd.") + f.replace("/", ".") for f in folders}


def python(code: str, *, first: Path, cwd: Path, isolated_from_checkout: bool = False) -> str:
    """Stdout of a fresh interpreter that finds `first`, then what this one finds, and runs no .pth file.

    Without .pth files an editable installation in this environment is not seen.
    """
    inherited = [entry for entry in sys.path if entry and not (isolated_from_checkout and Path(entry) == ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(first), *inherited]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_checkout_imports_its_rooms_though_a_stray_model_py_comes_first(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("raise RuntimeError('the stray file was imported')\n")
    found = python("import gpt_fast_sd.model as room; print(room.__file__)", first=tmp_path, cwd=tmp_path)
    assert Path(found).resolve() == ROOT / "model" / "__init__.py"


def test_importing_the_door_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    code = "import sys, gpt_fast_sd; dir(gpt_fast_sd); print({'torch', 'numpy', 'torchao'} & {*sys.modules})"
    assert python(code, first=ROOT, cwd=tmp_path) == "set()"


def test_every_door_opens_without_the_optional_libraries(tmp_path: Path) -> None:
    doors = [name for name in package_folders().values() if name.count(".") < 2]
    code = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r})); import gpt_fast_sd, {', '.join(doors)}; "
    code += "print([getattr(gpt_fast_sd, name).__name__ for name in gpt_fast_sd.__all__])"
    assert python(code, first=ROOT, cwd=tmp_path) == str(gpt_fast_sd.__all__)


def test_the_door_hands_out_its_names_and_refuses_others() -> None:
    assert {*gpt_fast_sd.__all__} <= {*dir(gpt_fast_sd)}
    names = ["Completion", "DraftConfig", "Engine", "EngineConfig", "SamplingParams", "TokenEvent"]
    assert sorted(gpt_fast_sd.__all__) == names
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        gpt_fast_sd.Enigne  # noqa: B018


def test_pyproject_has_the_version_and_installs_every_package_of_the_checkout() -> None:
    assert gpt_fast_sd.__version__ == pyproject()["project"]["version"]
    assert sorted(pyproject()["tool"]["setuptools"]["packages"]) == sorted(package_folders().values())


def test_every_room_next_to_the_package_is_a_link_in_it() -> None:
    rooms = [folder for folder in package_folders() if "/" not in folder and folder != "gpt_fast_sd"]
    assert sorted(rooms) == ["model", "tp"]
    for room in rooms:
        assert os.readlink(ROOT / "gpt_fast_sd" / room) == f"../{room}"


@pytest.mark.slow
def test_a_wheel_holds_every_package_and_the_bundled_files(tmp_path: Path) -> None:
    source, target, elsewhere = tmp_path / "source", tmp_path / "target", tmp_path / "elsewhere"
    for name in (folder for folder in package_folders() if "/" not in folder):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "gpt_fast_sd" / "bundled").mkdir(exist_ok=True)
    (source / "gpt_fast_sd" / "bundled" / "planted.bin").write_bytes(b"\0")
    elsewhere.mkdir()

    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("gpt_fast_sd-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)

    installed = target / "gpt_fast_sd"
    ours = {path.relative_to(source / "gpt_fast_sd") for path in (source / "gpt_fast_sd").rglob("*") if path.is_file()}
    assert ours <= {path.relative_to(installed) for path in installed.rglob("*")}
    assert {path.name for path in target.iterdir()} == {"gpt_fast_sd", wheel.name.split("-py3")[0] + ".dist-info"}
    modules = [*package_folders().values(), "gpt_fast_sd.config"]
    code = f"import {', '.join(modules)}, sys; print(*(sys.modules[name].__file__ for name in {modules!r}), sep='\\n')"
    for found in python(code, first=target, cwd=elsewhere, isolated_from_checkout=True).splitlines():
        assert Path(found).is_relative_to(installed)


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
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "running eagerly" in done.stderr
