"""Build a wheel for this platform that carries the C++ kernels built, for machines without a compiler.

    python scripts/maintain/build_wheel.py --dist dist

It holds the kernels for each instruction set of this kind of CPU and for the head dims of common models. Which of them
a machine runs is chosen there; what the wheel lacks is built there, if there is a compiler.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the other programs and their helpers lie

from common import parser_of, refusing
from flags import positive
from gpt_fast_sd.fast import InstructionSet, build_kernel, kernels_to_build, sets_of_this_kind

PROGRAM = "build_wheel.py"
PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")
ROOT = Path(__file__).resolve().parents[2]
HEAD_DIMS = [64, 80, 96, 128, 256]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(PROGRAM, __doc__)
    add = parser.add_argument
    add("--dist", metavar="DIR", type=Path, default=Path("dist"), help="where the wheel goes (default: dist)")
    dims = " ".join(map(str, HEAD_DIMS))
    add("--head-dims", metavar="N", type=positive, nargs="+", default=HEAD_DIMS, help=f"of models (default: {dims})")
    add("--platform", metavar="TAG", default=PLATFORM, help=f"of the wheel's name (default: {PLATFORM})")
    add("--sets", metavar="NAME", nargs="+", help=f"of {', '.join(sets_of_this_kind())} (default: all)")
    return parser.parse_args(argv)


def asked(args: argparse.Namespace) -> list[InstructionSet]:
    """The instruction sets to build for; ValueError for one that CPUs of this kind do not have, or a wrong head dim."""
    known = sets_of_this_kind()
    for name in args.sets or ():
        if name not in known:
            raise ValueError(f"--sets {name}: CPUs of this kind have {', '.join(known)}")
    for head_dim in args.head_dims:
        if head_dim % 16 or head_dim > 256:
            raise ValueError(f"--head-dims {head_dim}: allowed are multiples of 16 up to 256")
    return [known[name] for name in args.sets or known]


def require_folder(flag: str, folder: Path) -> None:
    """Make the folder where it is missing; ValueError where no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{flag} {folder}: {error.strerror or error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Build the libraries, then the wheel around them."""
    args = parse(argv)
    with refusing(PROGRAM), tempfile.TemporaryDirectory() as folder:
        jobs, tree = list(kernels_to_build(asked(args), args.head_dims)), Path(folder) / "tree"
        require_folder("--dist", args.dist)
        for name in ("gpt_fast_sd", "model", "tp"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "built"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree)
        for n, job in enumerate(jobs, 1):
            of = f" of {job.head_dim} dims" if job.head_dim else ""
            print(f"{n}/{len(jobs)} {job.source.stem}{of}, {job.instructions.name}", flush=True)
            build_kernel(job, tree / "gpt_fast_sd" / "fast" / "cpu")
        settings, own = f"--config-settings=--build-option=--plat-name={args.platform}", Path(folder) / "dist"
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", settings, "-w", str(own), str(tree)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"pip cannot build the wheel: {(done.stderr.strip().splitlines() or ['?'])[-1]:.300}")
        (made,) = own.glob("*.whl")
        wheel = Path(shutil.copy(made, args.dist))
        print(f"{wheel}, {wheel.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
