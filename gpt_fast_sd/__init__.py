"""Long-context speculative decoding: one Llama, a draft that reads a sparse view of its cache, lossless verification.

    from gpt_fast_sd import Engine, EngineConfig, DraftConfig, SamplingParams

The names above load on first use, so that importing this package (as every import of a room does) stays cheap.
"""

import os as _os
import sys as _sys
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import EngineConfig, SamplingParams
    from .engine import Engine
    from .policies import registry as registry
    from .policies.config import DraftConfig
    from .serving.requests import Completion, TokenEvent

__version__ = "0.1.0"
__all__ = ["Completion", "DraftConfig", "Engine", "EngineConfig", "SamplingParams", "TokenEvent"]

# Threads that wait spin for some 20 us, then sleep, as a machine has other work: GNU's OpenMP reads this with torch.
if "torch" not in _sys.modules and "OMP_WAIT_POLICY" not in _os.environ:
    _os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The folders model/ and tp/ of a checkout are links here; where links were not kept, as in some archives, they are
# found next to this folder.
_here = _Path(__file__).resolve().parent
if not (_here / "model").is_dir():
    __path__.append(str(_here.parent))

_defined_in = {"Engine": ".engine", "DraftConfig": ".policies.config", "registry": ".policies"}
_defined_in |= dict.fromkeys(("EngineConfig", "SamplingParams"), ".config")
_defined_in |= dict.fromkeys(("Completion", "TokenEvent"), ".serving.requests")

if not TYPE_CHECKING:  # a type checker that saw this would accept any misspelt name as Any

    def __getattr__(name: str) -> object:
        if name not in _defined_in:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(_defined_in[name], __name__), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_defined_in})
