"""Long-context speculative decoding: one Llama, a draft that reads a sparse view of its cache, lossless verification.

    from gpt_fast_sd import Engine, EngineConfig, DraftConfig, SamplingParams

The names above load on first use, so that importing this package (as every import of a room does) stays cheap.
"""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import DraftConfig, EngineConfig, SamplingParams
    from .engine import Engine
    from .requests import Completion, TokenEvent

__version__ = "0.1.0"
__all__ = ["Completion", "DraftConfig", "Engine", "EngineConfig", "SamplingParams", "TokenEvent"]

# In a checkout the rooms model/ and tp/ are next to this folder and are found as gpt_fast_sd.model and gpt_fast_sd.tp;
# an installed copy has them inside.
_beside = _Path(__file__).resolve().parent.parent
if (_beside / "pyproject.toml").is_file():
    __path__.append(str(_beside))

_defined_in = {
    "Completion": ".requests",
    "DraftConfig": ".config",
    "Engine": ".engine",
    "EngineConfig": ".config",
    "SamplingParams": ".config",
    "TokenEvent": ".requests",
}

if not TYPE_CHECKING:  # a type checker that saw this would accept any misspelt name as Any

    def __getattr__(name: str) -> object:
        if name not in _defined_in:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_import_module(_defined_in[name], __name__), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
