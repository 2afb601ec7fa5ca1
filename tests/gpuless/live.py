"""How many bytes of tensors are there at a time, on the CPU, and inside our operators as a CPU or as CUDA runs them."""

from typing import Any
from unittest import mock

import torch
from torch._library.custom_ops import OPDEFS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors, made inside, that were there at a time; what operators of torch take is not seen.

    of: whose bodies of our operators count. Those for CUDA run in addition to the CPU's, on its tensors and as for
    sm_90, except for their kernels, which are not launched: their allocations count, their results are dropped.
    """

    def __init__(self, of: str = "cpu") -> None:
        super().__init__()
        assert of in ("cpu", "cuda")
        self.of, self.peak = of, 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        body = OPDEFS.get(func.name().partition(".")[0])
        if body and self.of == "cuda":
            self._launch_nothing(body._backend_fns["cuda"], args)
        elif body:  # torch takes the mode off before it calls it
            with self:
                body._init_fn(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        self._live = {key: live for key, live in self._live.items() if not live[0].expired()}
        for tensor in tree_leaves(out):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            if tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(n for _, n in self._live.values()))
        return out

    def _launch_nothing(self, body: Any, args: Any) -> None:
        from triton.runtime.jit import JITFunction

        from gpt_fast_sd.fast.triton import common as triton_common

        launches_nothing = mock.patch.object(JITFunction, "run", lambda *args, **kwargs: None)
        with launches_nothing, mock.patch.object(triton_common, "architecture", lambda: 90), self:
            body(*args)
