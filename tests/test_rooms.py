"""The rooms look downhill and are entered by their doors: read from the source, nothing is imported."""

import ast
import graphlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Room:
    """A folder, the dotted name it is imported by, and what it may import besides the standard library and itself.

    below: the folders of the rooms downhill.  libraries: third-party packages, None for any.
    """

    folder: str
    door: str
    below: tuple[str, ...] = ()
    libraries: frozenset[str] | None = None


BASE = frozenset({"torch", "numpy"})
PROGRAM = 'if __name__ == "__main__":'
LOADERS = frozenset({"safetensors", "gguf", "sentencepiece", "tokenizers", "huggingface_hub", "tiktoken", "jinja2"})
PACKAGES = ("model", "tp", "gpt_fast_sd")
MEASURED = BASE | {"matplotlib", "safetensors", "gguf", "transformers", "llama_cpp", "pytest", "tqdm"}
ROOMS = (  # a room stands before the room around it
    Room(folder="model", door="gpt_fast_sd.model", libraries=BASE | LOADERS),
    Room(folder="tp", door="gpt_fast_sd.tp", below=("model",), libraries=BASE),
    Room(folder="gpt_fast_sd", door="gpt_fast_sd", below=PACKAGES, libraries=BASE | {"torchao", "tqdm", "triton"}),
    Room(folder="scripts/inputs", door="inputs", below=PACKAGES),
    Room(folder="scripts/measuring", door="measuring", below=(*PACKAGES, "scripts/inputs"), libraries=MEASURED),
    Room(folder="scripts", door="scripts", below=(*PACKAGES, "scripts/inputs", "scripts/measuring")),
    Room(folder="tests", door="tests", below=(*PACKAGES, "scripts/inputs", "scripts/measuring", "scripts")),
)


def room_of_file(path: str) -> Room:
    """The innermost room that holds the file at path, relative to the root."""
    return next(room for room in ROOMS if path.startswith(f"{room.folder}/"))


def imports(path: str, source: str) -> Iterator[tuple[int, bool, str, str]]:
    """(line, is relative, module, name) of everything imported anywhere in source; name is "" for `import module`."""
    here = room_of_file(path)
    package = [*here.door.split("."), *path.removeprefix(f"{here.folder}/").split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, False, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, node.level > 0, module, alias.name) for alias in node.names)


def complaint(here: Room, is_relative: bool, module: str, name: str) -> str | None:
    """What is wrong when a file of this room imports name from module, None if nothing is."""
    # the innermost room that the dotted name lies in, None for the world outside
    there = next((room for room in ROOMS if f"{module}.{name}.".startswith(f"{room.door}.")), None)
    top = module.split(".")[0]
    if top in ("model", "tp"):
        return f"enters {top}/ by a name it only has in a checkout"
    if there is None:
        known = here.libraries is None or top in here.libraries or top in sys.stdlib_module_names
        return None if known else f"{here.folder}/ does not import {top or 'from above the package'}"
    if there is here:
        return "absolute inside its own room" if not is_relative and here.folder in PACKAGES else None
    if there.folder not in here.below:
        return f"looks uphill, from {here.folder}/ to {there.folder}/"
    if is_relative:
        return f"enters {there.folder}/ relatively"
    inside = (ROOT / there.folder / f"{name}.py").is_file() and module == there.door
    is_open = "." not in there.door  # others may name what is inside: gpt_fast_sd's own door holds only public names
    if here.folder != "tests" and not is_open and (inside or module.startswith(f"{there.door}.")):
        return f"reaches past the door of {there.folder}/"
    return None


def complaints(path: str, source: str) -> list[str]:
    """One line for every import in source that its room does not allow."""
    found = ((line, complaint(room_of_file(path), *what)) for line, *what in imports(path, source))
    return [f"{path}:{line}: {wrong}" for line, wrong in found if wrong]


def files_of(*folders: str) -> list[str]:
    """Every Python file below the folders, relative to the root."""
    return sorted({p.relative_to(ROOT).as_posix() for folder in folders for p in (ROOT / folder).rglob("*.py")})


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def modules_read(path: str, source: str, files: Mapping[str, str]) -> set[str]:
    """Dotted names of the files that a file imports, wherever in it; files: dotted name -> path."""
    named = {f"{module}.{one}" if f"{module}.{one}" in files else module for _, _, module, one in imports(path, source)}
    return {name for name in named if name in files and files[name] != path}


def circle(sources: Mapping[str, str]) -> list[str]:
    """Paths of files that import each other in a circle, the first one again at the end; [] where there is none."""
    files = {}
    for path in sources:
        here = room_of_file(path)
        parts = [here.door, *path.removeprefix(f"{here.folder}/").removesuffix(".py").split("/")]
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: modules_read(path, sources[path], files) for name, path in files.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [files[name] for name in error.args[1]]
    return []


def programs_imported(path: str, source: str) -> list[str]:
    """One line for every program that a program imports as if it were a library."""
    ours = "gpt_fast_sd", "measuring"  # libraries, of which no module is a program
    siblings = ((module, one) for _, _, module, one in imports(path, source) if module.split(".")[0] not in ours)
    named = {name.rpartition(".")[2] for both in siblings for name in both}
    found = [other for other in files_of("scripts") if Path(other).stem in named and other != path]
    return [f"{path}: imports the program {other}" for other in found if PROGRAM in text_of(other)]


def test_every_import_looks_downhill_through_a_door() -> None:
    paths = files_of(*(room.folder for room in ROOMS))
    assert {"model/llama.py", "gpt_fast_sd/__init__.py", "tests/test_rooms.py"} <= set(paths)
    assert [line for path in paths for line in complaints(path, text_of(path))] == []


FLOORS = ("core", "fast", "quantization", "policies", "loading", "serving", "engine")  # of gpt_fast_sd/, from below
OF_THE_CORE = {"torch", "gpt_fast_sd.model"}  # what it imports besides itself and the standard library


def floor_of(module: str) -> str | None:
    """The floor of a module of gpt_fast_sd, by its dotted name; None for its door, and for anything else."""
    first = module.removeprefix("gpt_fast_sd.").split(".")[0] if module.startswith("gpt_fast_sd.") else ""
    if not first or first in ("model", "tp"):
        return None
    return first if first in FLOORS else "core"


def steps_up(path: str, source: str) -> list[str]:
    """One line for every import that looks up from a file's floor; in the core, also for what it does not import."""
    own = floor_of(path.removesuffix("/__init__.py").removesuffix(".py").replace("/", "."))
    found = []
    for line, _, module, name in imports(path, source):
        there = floor_of(module) or floor_of(f"{module}.{name}")
        if own and there and FLOORS.index(there) > FLOORS.index(own):
            found.append(f"{path}:{line}: looks up, from {own} to {there}")
        foreign = there is None and module.split(".")[0] not in {*sys.stdlib_module_names, "torch"}
        if own == "core" and foreign and module not in OF_THE_CORE and path != "gpt_fast_sd/__init__.py":
            found.append(f"{path}:{line}: the core does not import {module}")
    return found


STEPS_UP = {
    "gpt_fast_sd/round.py": "from .fast.compile import CompiledStep",
    "gpt_fast_sd/state.py": "import numpy",
    "gpt_fast_sd/fast/choose.py": "from ..quantization.table import TABLE",
    "gpt_fast_sd/policies/quest.py": "from ..serving import requests",
}


def test_the_folders_of_the_package_look_one_way_and_a_step_up_is_seen() -> None:
    paths = {*files_of("gpt_fast_sd")} - {"gpt_fast_sd/__init__.py"}
    assert [line for path in paths for line in steps_up(path, text_of(path))] == []
    assert [len(steps_up(path, source)) for path, source in STEPS_UP.items()] == [1] * len(STEPS_UP)


def test_no_files_import_each_other_in_a_circle_which_is_seen_wherever_the_import_stands() -> None:
    """Not even for types alone, nor inside functions: a reader of a file can first read what it is built on."""
    assert circle({path: text_of(path) for path in files_of(*PACKAGES, "scripts")}) == []
    late = {
        "model/cache.py": "def f():\n    from .llama import Transformer",
        "model/llama.py": "from . import rope",
        "model/rope.py": "if TYPE_CHECKING:\n    from .cache import KV",
    }
    assert set(circle(late)) == set(late)
    assert circle({**late, "model/rope.py": "import math"}) == []


def test_programs_import_the_package_and_never_each_other() -> None:
    assert [line for path in files_of("scripts") for line in programs_imported(path, text_of(path))] == []
    assert programs_imported("scripts/plan.py", "def f():\n    from generate import parse")


ASKS_FOR_A_DEVICE = re.compile(r"\.is_cuda|device\.type|triton_serves|cpu_attention|is_compiling")


def test_what_is_read_and_when_does_not_depend_on_who_attends() -> None:
    """The body that attends or selects is chosen inside fast/, once for policies, prefill and caches."""
    paths = [*files_of("gpt_fast_sd/policies"), "gpt_fast_sd/attention.py", "gpt_fast_sd/prefill.py", "model/cache.py"]
    assert [path for path in paths if ASKS_FOR_A_DEVICE.search(text_of(path))] == []


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("model/llama.py", "from gpt_fast_sd.engine import Engine", "uphill"),
        ("model/llama.py", "from gpt_fast_sd import model", "absolute inside its own room"),
        ("model/llama.py", "from ... import other", "from above the package"),
        ("model/llama.py", "from model.rope import apply_rope", "only has in a checkout"),
        ("model/llama.py", "import torch, torchao", "does not import torchao"),
        ("tp/plan.py", "from ..model import ModelConfig", "relatively"),
        ("gpt_fast_sd/engine.py", "from gpt_fast_sd.model.llama import Transformer", "past the door of model/"),
        ("gpt_fast_sd/engine.py", "from gpt_fast_sd.model import Transformer, llama", "past the door of model/"),
        ("gpt_fast_sd/engine.py", "import scripts.generate", "uphill"),
        ("scripts/generate.py", "import gpt_fast_sd.model.llama", "past the door of model/"),
        # what looks downhill, through a door
        ("model/llama.py", "import math, torch\nfrom torch import nn\nfrom .rope import apply_rope", ""),
        ("model/files/tokenizer.py", "def f():\n    import tiktoken", ""),
        ("tp/plan.py", "from gpt_fast_sd.model import ModelConfig\nfrom .mesh import start", ""),
        ("gpt_fast_sd/engine.py", "import torchao\nfrom gpt_fast_sd.model import KVCache\nfrom .kernels import a", ""),
        ("gpt_fast_sd/engine.py", "from gpt_fast_sd import tp\nfrom . import kernels\nfrom .policies import a", ""),
        ("scripts/measuring/turns.py", "from gpt_fast_sd.fast.ops.sparse import sparse_attention", ""),
        ("tests/test_llama.py", "from gpt_fast_sd.model.llama import Transformer", ""),
        ("scripts/generate.py", "import rich\nfrom gpt_fast_sd import Engine\nfrom measuring.turns import run", ""),
    ],
)
def test_the_checker_sees_a_violation_and_lets_a_downhill_import_pass(path: str, source: str, wrong: str) -> None:
    assert [wrong in line for line in complaints(path, source)] == [True] * bool(wrong)


def test_no_line_of_cpp_is_longer_than_120_columns() -> None:
    files = [path for folder in (*PACKAGES, "tests") for path in (ROOT / folder).rglob("*.[ch]pp")]
    lines = {f"{path}:{n}": line for path in files for n, line in enumerate(path.read_text("utf-8").splitlines(), 1)}
    assert {path.suffix for path in files} == {".cpp", ".hpp"}
    assert [place for place, line in lines.items() if len(line) > 120] == []


# Spelt apart, so that this file holds none of them.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:" + "|".join(["home", "root", "tmp", "mnt", "work", "Users"]) + r")/")


def test_no_file_of_the_project_names_a_path_of_some_machine() -> None:
    for folder in ("home", "tmp"):  # a planted one is seen
        assert MACHINE_PATH.search(f'open("/{folder}/me/file")')
        assert not MACHINE_PATH.search(f"see https://example.org/{folder}/page or ./{folder}/x")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: no list of the project's files")
    listing = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = []
    for path in sorted({*output.split("\0")} - {""}):
        try:
            lines = text_of(path).splitlines()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):  # binary, deleted, another repository
            continue
        found += [f"{path}:{number}: {line[:200]}" for number, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]
    assert not found, "\n".join(found)
