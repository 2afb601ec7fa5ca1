"""Tiny models whose greedy text is not degenerate, a tokenizer whose ids are bytes, and a test of fit for draws.

Parameters of tests that are many: `few` and `thinned` leave some to the ordinary run, all to the slow one beside it.

Shapes: T tokens, V vocabulary.
"""

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_fast_sd import DraftConfig, Engine, EngineConfig, SamplingParams
from gpt_fast_sd.fast.cpu.packing import pack_linears
from gpt_fast_sd.model import FORMATS, CacheFormat, CausalSelf, ModelConfig, Transformer
from gpt_fast_sd.sampling import SamplingTable

BOS, EOS = 256, 257
Patch, Printed = pytest.MonkeyPatch, pytest.CaptureFixture[str]
Refuses = Callable[..., str]  # the fixture of tests/conftest.py: of a program's main and its arguments

DATA = Path(__file__).parent / "data"  # results of this project's programs, few of them


def few(values: Iterable[Any], kept: Container[Any]) -> list[Any]:
    """The values of a test's parameter: those kept are of the ordinary run, the others of the slow one.

    A tuple has a value for each of several parameters.
    """
    return [
        pytest.param(*value if isinstance(value, tuple) else (value,), marks=() if value in kept else pytest.mark.slow)
        for value in values
    ]


def thinned(names: str, first: Sequence[Any], second: Sequence[Any]) -> Any:
    """Two parameters of a test: each value of both in the ordinary run, the other pairs in the slow one."""
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(a, b, marks=() if i % len(second) == j % len(first) else pytest.mark.slow)
            for i, a in enumerate(first)
            for j, b in enumerate(second)
        ],
    )


def form_of(dtype: torch.dtype) -> CacheFormat:
    """The format of a cache whose numbers have this dtype; of int8 it is that of bytes."""
    return next(form for form in FORMATS.values() if form.dtype == dtype)


def tiny_config(**changes: Any) -> ModelConfig:
    """A two-layer shape over the ids of ByteTokenizer, G = 2; it has no EOS unless eos_ids asks for one."""
    config = ModelConfig(
        vocab_size=258, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, max_seq_len=4096
    )
    return replace(config, **changes)


def tiny_model(config: ModelConfig | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    """Random weights of this seed, large enough that attention is sharp and greedy text keeps varying."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config or tiny_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3, generator=generator)
            elif "norm" in name:
                parameter.uniform_(0.7, 1.3, generator=generator)
            elif name == "embedding.weight":
                parameter.normal_(generator=generator)
            else:  # unit variance in gives a variance of 4 (queries and keys: scores of about 4) or 2 out
                gain = 2.0 if "wqkv" in name else 1.4
                parameter.normal_(std=gain * parameter.shape[1] ** -0.5, generator=generator)
    return model.to(dtype).eval().requires_grad_(False)


def tiny_engine(
    draft: DraftConfig | None = None, draft_model: Transformer | None = None, *, model: Transformer | None = None,
    tokenizer: Any = None, parallel: Any = None, **settings: Any,
) -> Engine:  # fmt: skip
    """An eager engine of 2 slots of 512 tokens on the CPU, around the tiny model unless another is given."""
    wanted: dict[str, Any] = {"batch_size": 2, "max_seq_len": 512, "device": "cpu", "compile": False} | settings
    return Engine(model or tiny_model(), tokenizer, EngineConfig(**wanted), draft, draft_model, parallel=parallel)


def pack_or_skip(model: nn.Module, *, few_rows: bool = False) -> None:
    """Pack a model's weights for the kernels of this CPU, if they can be built."""
    if not pack_linears(model, few_rows=few_rows):
        pytest.skip("this CPU or its compiler lacks AVX-512 bf16")


SIZES = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip


def random_transformers_model(family: str, **changes: Any) -> Any:
    """A random model of transformers; biases and norm weights, which it starts at 0 and 1, are random too."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**SIZES | changes, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    return model


def random_ids(n: int, *, seed: int = 0, vocab_size: int = 256) -> list[int]:
    """n token ids, the same for the same seed."""
    return torch.randint(vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def ahead(patch: Patch, owner: Any, name: str, do: Callable[..., object]) -> None:
    """Let this be done with its arguments ahead of each call of a method."""
    real = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        do(*args, **kwargs)
        return real(*args, **kwargs)

    patch.setattr(owner, name, method)


class Noting(TorchDispatchMode):
    """Notes, in their order, what a function says of each operator that runs inside and of its arguments."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...]], Any]) -> None:
        super().__init__()
        self.note, self.seen = note, list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(self.note(func, args))
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def whole_text_logits(model: Transformer, ids: Sequence[int]) -> Tensor:
    """The logits of a text in one uncached forward: T ids -> [T, V]."""
    return model(torch.tensor([list(ids)]), torch.arange(len(ids))[None], CausalSelf(model.config.windows))[0]


def table_of(params: Sequence[SamplingParams], vocab_size: int) -> SamplingTable:
    """One slot for each, on the CPU; the seed is 0 where none is given."""
    table = SamplingTable.empty(len(params), vocab_size, torch.device("cpu"))
    for slot, p in enumerate(params):
        table.assign(slot, p, p.seed or 0, vocab_size)
    return table


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """How many times the 1 - 1e-6 quantile of its distribution Pearson's statistic is: above 1 cannot be chance.

    Cells that expect fewer than 5 are put together; quantile by Wilson and Hilferty (1931), z = 4.7534.
    """
    rare = expected < 5
    counts = torch.cat((counts[~rare].double(), counts[rare].sum().double()[None]))
    expected = torch.cat((expected[~rare].double(), expected[rare].sum().double()[None]))
    if expected[-1] == 0:
        assert counts[-1] == 0
        counts, expected = counts[:-1], expected[:-1]
    freedom = max(1, len(expected) - 1)
    statistic = float(((counts - expected).square() / expected).sum())
    return statistic / (freedom * (1 - 2 / (9 * freedom) + 4.7534 * math.sqrt(2 / (9 * freedom))) ** 3)


class ByteTokenizer:
    """Every byte is a token; BOS and EOS add nothing to a text. Satisfies gpt_fast_sd.model.Tokenizer."""

    vocab_size = 258
    drops_first_space = False

    def __init__(self, *, bos_id: int | None = BOS, eos_ids: tuple[int, ...] = (EOS,)) -> None:
        self.bos_id, self.eos_ids = bos_id, eos_ids

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        prefix = [] if self.bos_id is None or not bos else [self.bos_id]
        return [*prefix, *text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def chat(self, messages: Sequence[Mapping[str, str]], *, parse_special: bool = False) -> list[int]:
        return self.encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""
