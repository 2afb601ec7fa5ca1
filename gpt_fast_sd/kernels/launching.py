"""What Triton needs of a machine before it launches anything, called before anything is at stake."""

from __future__ import annotations

import tempfile
from pathlib import Path


def prepare_launches() -> None:
    """What Triton does at its first launch on the current CUDA device is done; it raises what Triton raises.

    Triton builds a C module with the machine's compiler and Python's headers, unless its cache has it, and loads it.
    """
    import triton.backends.nvidia.driver as nvidia
    import triton.runtime.build as build
    from triton.runtime import driver

    assert driver.active.utils is not None and driver.active.get_current_target().backend == "cuda"
    if hasattr(nvidia, "make_launcher"):  # until Triton 3.6 each kernel has a launcher of its own: can one be built?
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "launcher.c")
            source.write_text("#include <Python.h>\n", encoding="utf-8")
            build._build("launcher", str(source), folder, [], [], [], [])
