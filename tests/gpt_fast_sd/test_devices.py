"""A device that cannot work is refused in one sentence before weights are read, by engine and torchrun.

No GPU is here: torch.cuda answers as it would on the machine that the test describes. At its first launch Triton runs
its own code, with the compiler, headers or libcuda missing.
"""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt_fast_sd import DraftConfig, Engine, EngineConfig
from gpt_fast_sd.loading.machine import free_memory, require_current, require_kernels, sensible_threads
from gpt_fast_sd.tp import Group, start, take_device
from tests.helpers import Patch, Printed, tiny_engine

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
ROOT, GIB = Path(__file__).resolve().parents[2], 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOO_OLD = (  # as torch 2.11 to 2.13 begin it
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def gpu(
    patch: Patch,
    name: str = "NVIDIA H100",
    capability: tuple[int, int] = (9, 0),
    *,
    n: int = 1,
    rocm: str | None = None,
) -> list[int]:
    """A machine with n such GPUs, as torch would report them -> the list of the devices made current."""
    current: list[int] = [0]
    for attribute, answer in {
        "is_available": lambda: n > 0,
        "device_count": lambda: n,
        "current_device": lambda: current[-1],
        "set_device": lambda device: current.append(torch.device("cuda", device).index),
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: name,
        "mem_get_info": lambda device=None: (79 << 30, 80 << 30),
        "empty_cache": lambda: None,
    }.items():
        patch.setattr(torch.cuda, attribute, answer)
    patch.setattr(torch.version, "cuda", None if rocm else "13.0")
    patch.setattr(torch.version, "hip", rocm)
    return current


Machine = Callable[[Patch, Path], Any]


def no_gpu(says: str, *, built: str | None = "13.0", visible: str | None = None) -> Machine:
    """torch, built for such a CUDA, sees no device and says so when it initializes."""

    def machine(monkeypatch: Patch, folder: Path) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError(says)))
        monkeypatch.setattr(torch.version, "cuda", built)

    return machine


def triton_before_its_first_launch(monkeypatch: Patch, folder: Path) -> None:
    """Triton has built nothing yet; its libcuda is an empty file, which is as much as a linker looks for."""
    driver = pytest.importorskip("triton").runtime.driver
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    for name in ("_active", "_default"):
        monkeypatch.setattr(driver, name, None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(folder))
    (folder / "libcuda.so.1").touch()
    monkeypatch.delenv("CC", raising=False)
    for cached in (nvidia.libcuda_dirs, nvidia.library_dirs):
        cached.cache_clear()


# ---- the machines: each makes torch and Triton answer as they would there --------------------------------------------


def before_its_first_launch(change: Machine) -> Machine:
    """A GPU for which Triton has built nothing yet, and what is missing."""

    def machine(monkeypatch: Patch, folder: Path) -> None:
        gpu(monkeypatch)
        triton_before_its_first_launch(monkeypatch, folder)
        change(monkeypatch, folder)

    return machine


def no_libcuda(monkeypatch: Patch, folder: Path) -> None:
    monkeypatch.delenv("TRITON_LIBCUDA_PATH")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(subprocess, "check_output", lambda *args, **kwargs: b"")


def a_gpu_but(owner: Any, name: str, answer: Callable[..., Any]) -> Machine:
    """A GPU, and one thing that is not as it should be."""
    return lambda patch, folder: (gpu(patch), patch.setattr(owner, name, answer))


an_old_driver = no_gpu(TOO_OLD)
a_build_without_cuda = no_gpu("Torch not compiled with CUDA enabled", built=None)
a_hidden_gpu = no_gpu("No CUDA GPUs are available", visible="")
# an HGX board of H100s or H200s whose fabric manager does not run
NO_FABRIC = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
    "that might have already set an error? Error 802: system not yet initialized"
)
BUSY = RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be ...")
MACHINES: dict[str, tuple[Machine, str]] = {
    "a Turing": (lambda patch, folder: gpu(patch, "Tesla T4", (7, 5)),
        r"Tesla T4 has compute capability 7\.5, and our kernels need 8\.0 or more"),
    "an AMD": (lambda patch, folder: gpu(patch, "AMD Instinct MI300X", (9, 4), rocm="6.4.1"),
        r"device 'cuda' is an AMD GPU to torch .* \(ROCm 6\.4\.1\), and our kernels are made for NVIDIA's"),
    "no Triton": (a_gpu_but(importlib.util, "find_spec", lambda name: None),
        r"device 'cuda' needs triton, which is not installed"),
    "no compiler": (before_its_first_launch(lambda patch, folder: patch.setenv("PATH", str(folder))),
        r"device 'cuda' cannot be used: .*Failed to find C compiler.*\(Ubuntu: gcc python3-dev\), or use"),
    "another compiler": (before_its_first_launch(lambda patch, folder: patch.setenv("CC", str(folder / "gcc-99"))),
        r"device 'cuda' cannot be used: .*gcc-99.*\(Ubuntu: gcc python3-dev\), or use device 'cpu'$"),
    "no headers": (before_its_first_launch(
        lambda patch, folder: patch.setattr(sysconfig, "get_paths", lambda *_, **__: {"include": str(folder)})),
        r"device 'cuda' cannot be used: .*Python\.h: No such file.*\(Ubuntu: gcc python3-dev\), or use"),
    "no libcuda": (before_its_first_launch(no_libcuda),
        r"device 'cuda' cannot be used: .*libcuda.*let `/sbin/ldconfig -p` list the driver's libcuda\.so\.1"),
    "a busy GPU": (a_gpu_but(torch.cuda, "get_device_capability", raising(BUSY)),
        r"device 'cuda' cannot be used: CUDA error: CUDA-capable device\(s\) is/are busy or unavailable$"),
    "an old driver": (an_old_driver,
        r"device 'cuda' was requested, .* built for CUDA 13\.0 and says: The NVIDIA driver .* is too old"),
    "no fabric": (no_gpu(NO_FABRIC),
        r"device 'cuda' was requested, but .* Error 802: system not yet initialized; use 'cpu' or 'auto'$"),
    "a build without CUDA": (a_build_without_cuda,
        r"device 'cuda' was requested, but torch sees no CUDA device: torch .* built without CUDA"),
    "a hidden GPU": (a_hidden_gpu,
        r"device 'cuda' was requested, but torch sees no CUDA device: CUDA_VISIBLE_DEVICES is ''"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "sentence"), [pytest.param(*each, id=name, marks=needs_triton) for name, each in MACHINES.items()]
)
def test_what_a_machine_lacks_is_said_in_one_sentence_before_weights_are_read(
    machine: Machine, sentence: str, monkeypatch: Patch, tmp_path: Path, capfd: Printed
) -> None:
    monkeypatch.setattr(Group, "load", raising(AssertionError("weights were read before the refusal")))
    machine(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=sentence) as refusal:
        Engine.from_pretrained("bundled", EngineConfig(device="cuda"))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 450
    assert capfd.readouterr().err == ""  # not a page of a compiler's


# ---- a GPU that serves, and which device is taken --------------------------------------------------------------------

BUILDS = """
import ctypes, re, subprocess, sys, torch
from pathlib import Path
import triton.backends.nvidia.driver as nvidia
from gpt_fast_sd.loading.machine import require_kernels

called = re.findall(r"\\b(cu[A-Z]\\w*)\\s*\\(", Path(nvidia.dirname, "driver.c").read_text())
source, library = Path(sys.argv[1], "cuda.c"), Path(sys.argv[1], "libcuda.so.1")
source.write_text("".join(f"int {name}(void) {{ return 0; }}\\n" for name in sorted(set(called))))
subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
ctypes.CDLL(str(library))
answers = {"is_available": True, "current_device": 0, "get_device_capability": (9, 0), "get_device_name": "H100"}
for name, answer in answers.items():
    setattr(torch.cuda, name, lambda *args, answer=answer: answer)
nvidia.make_launcher = None  # as Triton 3.6, which builds one for each kernel
require_kernels(torch.device("cuda"))
require_kernels(torch.device("cuda"))
print("built", len(list(Path(sys.argv[1], "cache").rglob("cuda_utils*"))))
"""


@needs_triton
@pytest.mark.skipif(subprocess.run("gcc --version", shell=True, capture_output=True).returncode != 0, reason="no gcc")
def test_what_triton_launches_with_is_built_where_it_can_be(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    program = [sys.executable, "-c", BUILDS, str(tmp_path)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "built 1\n"), done.stderr


@needs_triton
def test_a_kernel_s_own_launcher_needs_a_compiler(monkeypatch: Patch, tmp_path: Path) -> None:
    """Triton 3.6 finds what it built before in its cache, and meets the missing compiler at the first new kernel."""
    from tests.gpuless.driver import stand_in

    gpu(monkeypatch)
    triton_before_its_first_launch(monkeypatch, tmp_path)
    monkeypatch.setattr("triton.backends.nvidia.driver.make_launcher", None, raising=False)
    require_kernels(CPU)
    with stand_in(90):
        require_kernels(CUDA)  # all that they need is there
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ValueError, match=r"Ubuntu: gcc python3-dev"):
            require_kernels(CUDA)


@pytest.mark.parametrize(
    ("machine", "why"),
    [(an_old_driver, r"CUDA 13\.0 and says: The NVIDIA driver on your system is too old \(found version 12020\)"),
     (a_build_without_cuda, r"torch \S+ is built without CUDA"),
     (a_hidden_gpu, None)],  # who hides GPUs is not told that they are there
)  # fmt: skip
def test_auto_says_once_why_a_gpu_that_is_there_is_not_used(
    machine: Machine, why: str | None, monkeypatch: Patch, tmp_path: Path
) -> None:
    machine(monkeypatch, tmp_path)
    driver, answer = tmp_path / "nvidia0", torch.cuda.is_available
    # before CUDA begins, torch counts by the driver's library, which also knows GPUs that torch cannot use
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def is_available() -> bool:  # torch may warn by itself, which is not said twice
        warnings.warn(f"CUDA initialization: {TOO_OLD}", stacklevel=2)
        return answer()

    for asked, there, torchs_own in (("auto", False, answer), ("auto", True, answer), ("auto", True, is_available),
                                     ("cpu", True, answer)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "is_available", torchs_own)
        if there:
            driver.touch()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert take_device(asked, [tmp_path / "none", driver]) == CPU
        assert len(said) == (asked == "auto" and there and why is not None)
        expected = f"this machine has an NVIDIA driver, but torch sees no CUDA device: .*{why}"
        assert all(re.search(expected, str(each.message)) for each in said)


def test_processes_of_a_machine_take_a_device_each(monkeypatch: Patch) -> None:
    current = gpu(monkeypatch, n=2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert take_device("auto") == CUDA and current == [0]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert take_device("cuda") == torch.device("cuda", 1) and current == [0, 1]
    assert start().device == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="process 2 of this machine needs a CUDA device of its own, and there are 2"):
        take_device("auto")


@needs_triton
def test_a_gpu_with_all_that_kernels_need_is_taken(monkeypatch: Patch) -> None:
    """If it is the current device: a model on another one is refused."""
    from tests.gpuless.driver import stand_in

    current = gpu(monkeypatch, n=2)
    with stand_in(90):
        wrong = r"is on cuda:1, but the current device is cuda:0, .*: call torch\.cuda\.set_device\(1\) first"
        with pytest.raises(ValueError, match=wrong):
            require_kernels(torch.device("cuda", 1))
        current.append(1)
        require_kernels(torch.device("cuda", 1))
    require_current(CUDA)


def test_an_engine_is_not_called_while_another_device_is_current(monkeypatch: Patch) -> None:
    current = gpu(monkeypatch, n=2)
    engine = tiny_engine(DraftConfig(policy="lookup", gamma=2))
    monkeypatch.setattr(engine._access, "device", torch.device("cuda", 1))
    given = {"generate": [[1, 2]], "stream": [[1, 2]], "logits": [1, 2], "redraft": DraftConfig()}
    for name, what in given.items():
        with pytest.raises(ValueError, match="the current device is cuda:0"):
            list(getattr(engine, name)(what))
    monkeypatch.setattr(engine._access, "device", CPU)
    assert len(engine.generate([[1, 2]])) == 1 and current == [0]


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_that_torch_has_kept_is_given_back_before_it_is_counted(monkeypatch: Patch) -> None:
    gpu(monkeypatch)
    kept = [10 << 30]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: ((79 << 30) - sum(kept), 80 << 30))
    assert free_memory(CUDA) == 79 << 30
    assert free_memory(CUDA, held=1 << 30) == 79 << 30  # what is held is not free there anyway


@pytest.fixture
def told_by(monkeypatch: Patch, tmp_path: Path) -> Callable[[dict[str, str]], None]:
    """A machine of 16 GiB and 8 physical cores whose kernel tells the process this, by file."""
    monkeypatch.setattr("gpt_fast_sd.loading.machine.PROC", tmp_path / "proc")
    monkeypatch.setattr("gpt_fast_sd.loading.machine.CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 16 * GIB >> 12, "SC_PAGE_SIZE": 1 << 12}.__getitem__)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


LIMITS: list[tuple[dict[str, str], int | None]] = [  # files -> GiB that may be allocated; None: all of the machine's
    ({}, None),
    ({"proc/self/cgroup": "3:cpu:/x\n"}, None),  # before there were any of memory
    ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 3145728 kB\nHugePages_Total: 0\n"}, 3),
    ({"proc/meminfo": "damaged\n\nMemAvailable: many kB\n"}, None),
    # version 2: the narrowest of the group and those above it, less what is used and no cache of files
    ({"proc/self/cgroup": "0::/a/b\n", "cgroup/a/b/memory.max": "max", "cgroup/a/b/memory.current": "7"}, None),
    ({"proc/self/cgroup": "0::/a/b\n", "cgroup/a/memory.max": f"{4 * GIB}\n", "cgroup/a/memory.current": f"{GIB}"}, 3),
    ({"proc/self/cgroup": "0::/a\n", "cgroup/a/memory.max": f"{4 * GIB}", "cgroup/a/memory.current": f"{3 * GIB}",
      "cgroup/a/memory.stat": f"anon 5\nactive_file {GIB}\ninactive_file {GIB // 2}\nfile {9 * GIB}\n"}, 2),  # of 2.5
    # version 1, also in a container, where the name is the host's
    ({"proc/self/cgroup": "0::/\n4:cpu,memory:/a\n", "cgroup/memory/a/memory.limit_in_bytes": f"{2 * GIB}",
      "cgroup/memory/a/memory.usage_in_bytes": f"{GIB}",
      "cgroup/memory/a/memory.stat": f"active_file 9\ntotal_active_file {GIB // 2}\n"}, 1),  # of 1.5
    ({"proc/self/cgroup": "4:memory:/docker/1234\n", "cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}",
      "cgroup/memory/memory.usage_in_bytes": f"{GIB}"}, 1),
    ({"proc/self/cgroup": "4:memory:/\n", "cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
      "cgroup/memory/memory.usage_in_bytes": "1"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("files", "gib"), LIMITS)
def test_a_cpus_free_memory_is_what_is_available_and_what_its_control_groups_leave(
    files: dict[str, str], gib: int | None, told_by: Callable[[dict[str, str]], None]
) -> None:
    """The machine's total was taken, and the kernel killed what did not fit into a container or beside others."""
    told_by(files)
    free = free_memory(CPU)
    assert free is not None and free // GIB == (16 if gib is None else gib)
    assert free_memory(CPU, held=16 * GIB) <= 0  # untouched memory, of which the kernel knows nothing yet


@pytest.mark.parametrize(("touched", "free"), [(0, 2), (1, 3), (4, 6), (9, 6)])
def test_memory_of_others_and_what_is_held_untouched_both_count(
    touched: int, free: int, told_by: Callable[[dict[str, str]], None]
) -> None:
    """Of 16 GiB others use 6, and this process has touched some of the 4 that it holds: each left the other out."""
    status = f"RssAnon:\t{touched * GIB >> 10} kB\n"
    told_by({"proc/self/status": status, "proc/meminfo": "MemAvailable: 6291456 kB\n"})
    found = free_memory(CPU, held=4 * GIB)
    assert found is not None and found // GIB == free


@pytest.mark.parametrize(
    ("files", "cores", "expected"),
    [
        ({"proc/self/cgroup": "0::/a\n", "cgroup/a/cpu.max": "max 100000\n"}, 64, 8),
        ({"proc/self/cgroup": "0::/a\n", "cgroup/a/cpu.max": "150000 100000\n"}, 64, 2),
        ({"proc/self/cgroup": "0::/a/b\n", "cgroup/cpu.max": "50000 100000\n", "cgroup/a/b/cpu.max": "max 1"}, 64, 1),
        ({"proc/self/cgroup": "4:cpu,cpuacct:/a\n", "cgroup/cpu/a/cpu.cfs_quota_us": "300000\n",
          "cgroup/cpu/a/cpu.cfs_period_us": "100000\n"}, 64, 3),
        ({"proc/self/cgroup": "4:cpu:/\n", "cgroup/cpu/cpu.cfs_quota_us": "-1\n",
          "cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 64, 8),
        ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "nonsense"}, 5, 5),
        ({}, 1, 1),
    ],
)  # fmt: skip
def test_threads_are_no_more_than_the_cores_that_a_process_has(
    files: dict[str, str], cores: int, expected: int, told_by: Callable[..., None], monkeypatch: Patch
) -> None:
    told_by(files)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert sensible_threads() == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert sensible_threads() == 8
