"""Is it right on the chip? Every test of this folder runs twice: small on the CPU, and as large as is real on CUDA.

    python -m pytest -m gpu                                        on a machine with a GPU: the second kind alone
    TRITON_INTERPRET=1 python -m pytest tests/gpu/test_kernels.py  the kernels' own bodies, interpreted on the CPU

An ordinary run has the first kind, so that no line here is executed only on CUDA. There are no graphs on a CPU:
tests.gpuless.pools stands in for them.
"""

from __future__ import annotations

import dataclasses
import faulthandler
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from torch._library.custom_ops import OPDEFS

from gpt_fast_sd.devices import TRAITS
from gpt_fast_sd.tp import why_no_cuda
from tests.gpt_fast_sd.fast import references
from tests.gpu.place import INTERPRETED, Place

if INTERPRETED:
    import tests.gpuless.interpreter  # noqa: F401  before any kernel: it makes bf16 right

SECONDS = 120  # a test may take, if no marker says more

NO_CUDA = None if torch.cuda.is_available() else f"torch sees no CUDA device here: {why_no_cuda()}"
ON_CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_CUDA is not None, reason=str(NO_CUDA))])


@pytest.fixture(scope="module", params=["cpu", ON_CUDA])
def place(request: pytest.FixtureRequest) -> Place:
    """Where the test runs."""
    return Place(torch.device(request.param))


@pytest.fixture(scope="module")
def bodies(place: Place) -> Iterator[None]:
    """On a CPU operators have their references for bodies, or, interpreted, those of CUDA, as for sm_90."""
    with pytest.MonkeyPatch.context() as patch:
        if not place.on_cuda:
            references.as_on_cuda(patch)
        if INTERPRETED:
            from gpt_fast_sd.fast.triton import common as triton_common

            patch.setattr(triton_common, "architecture", lambda: 90)
            ours = (op for name, op in OPDEFS.items() if name.startswith("gpt_fast_sd::"))
            for bodies in (op._backend_fns for op in ours if "cuda" in op._backend_fns):
                patch.setitem(bodies, "cpu" if "cpu" in bodies else None, bodies["cuda"])
        yield


@pytest.fixture(scope="module")
def captures(place: Place) -> Iterator[None]:
    """Rounds are captured: as CUDA graphs, or by what stands in for them."""
    if place.on_cuda:
        yield
        return
    from tests.gpuless.pools import stand_in

    with pytest.MonkeyPatch.context() as patch, stand_in("2.13"):
        patch.setitem(TRAITS, "cpu", dataclasses.replace(TRAITS["cpu"], captures=True))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """On CUDA a test that takes too long ends the process, with a traceback: nothing else stops a kernel that hangs."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    marker = item.get_closest_marker("seconds")
    faulthandler.dump_traceback_later(marker.args[0] if marker else SECONDS, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
