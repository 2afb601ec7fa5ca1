"""What Triton needs from a machine before it can launch anything, checked before any work is done."""

from __future__ import annotations

import tempfile
from pathlib import Path


def prepare_launches() -> None:
    """Do now what Triton does at its first launch on the current CUDA device; errors are Triton's own.

    Triton builds a C module with the machine's compiler and Python's headers, unless its cache has it, and loads it.
    """
    import triton.backends.nvidia.driver as nvidia
    import triton.runtime.build as build
    from triton.runtime import driver

    assert driver.active.utils is not None and driver.active.get_current_target().backend == "cuda"
    if hasattr(nvidia, "make_launcher"):  # up to Triton 3.6 each kernel has its own launcher: can one be built?
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "launcher.c")
            source.write_text("#include <Python.h>\n", encoding="utf-8")
            build._build("launcher", str(source), folder, [], [], [], [])
