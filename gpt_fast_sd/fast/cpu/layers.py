"""All layers of a packed Llama in one call on a CPU: layers.cpp, which calls the attention and the products.

A step over few rows is a hundred small operators, and to go through Python between two of them takes longer than most
take themselves.

Shapes: B batch rows, T tokens in this call, L layers, D width, N query heads, K kv heads, H head dim, F feed-forward
        width, V vocabulary, S positions of the cache, C listed entries.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt_fast_sd.model import CacheLayer

from . import attention_cpp as attention
from . import linear as products
from .build import builds, library

_WORD, _POINTER = ctypes.c_int64, ctypes.c_void_p
_WORDS_OF_A_LAYER = 4 + 4 * 8  # of Layer in C++


class _Call(ctypes.Structure):
    """LayersCall in C++."""

    _fields_ = [
        *((name, _WORD) for name in ("L", "B", "T", "D", "N", "K", "H", "V", "S")),
        *((name, _WORD) for name in ("kv_b", "kv_k", "scale_b", "scale_k", "tail", "fine", "k_dtype")),
        *((name, _WORD) for name in ("n_keys", "is_listed", "C", "W")),
        *((name, _POINTER) for name in ("tokens", "pos", "window_start", "embedding", "norm", "freqs", "attend")),
        *((name, _POINTER) for name in ("layers", "caches", "out", "mass", "spent")),
        *((name, _WORD) for name in ("embedding_is_packed", "threads")),
        ("eps", ctypes.c_double),
        ("rope_length", ctypes.c_double),
    ]


class Product(NamedTuple):
    """A packed weight, as `packed_linear` takes it."""

    packed: Tensor
    bias: Tensor | None
    scale: Tensor | None = None
    blocks: Tensor | None = None
    by_sums: bool = False

    def of(self, x: Tensor) -> Tensor:
        """`packed_linear` with it, for code that is not traced: bf16 x [..., I] -> bf16 [..., O]."""
        return products.product(x, self.packed, self.bias, self.scale, self.blocks, self.by_sums)


class LayerWeights(NamedTuple):
    """What a layer multiplies with; w_in is gated."""

    attention_norm: Tensor
    ffn_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    wqkv: Product
    wo: Product
    w_in: Product
    w_out: Product


class Spent(NamedTuple):
    """The seconds of one call."""

    n_tokens: int  # of a row
    listed: bool
    products: float
    attention: float
    layers: float  # all of it


class Listed(NamedTuple):
    """What a step reads that does not read everything, see sparse.py."""

    kv_indices: Sequence[Tensor]  # L of int64 [B, K, C]
    window_start: Tensor  # int64 [B]
    window_width: int

    def words(self) -> tuple[bool, int, int, int]:
        """What C++ is told of it."""
        return True, self.kv_indices[0].shape[-1], self.window_width, self.window_start.data_ptr()


def layers_build() -> bool:
    """Whether the kernel can be built here, or is."""
    return builds(products.LAYERS)


@functools.cache
def library_of_layers() -> ctypes.CDLL:
    """The kernel, built."""
    return library(products.LAYERS)()


@dataclass
class Stack:
    """The layers of a model, its embedding and its last norm; all but the products in bf16."""

    layers: Sequence[LayerWeights]
    embedding: Tensor  # [V, D]
    embedding_is_packed: bool
    norm: Tensor  # [D]
    freqs: Tensor  # fp32 [H // 2]
    rope_length: float
    eps: float
    n_heads: int
    n_kv_heads: int

    def __post_init__(self) -> None:
        """What is read of the tensors: they may move and change, but not be replaced."""
        self._tensors = [self.embedding, self.norm, self.freqs, *(x for layer in self.layers for x in _tensors(layer))]
        self._held = [x for x in self._tensors if x is not None]
        self.watched: list[Spent] | None = None  # to be told of each call
        self._addresses: list[int] = []  # of those held, when the table was made
        self._table = (_WORD * 0)()
        self._cached: dict[Any, ctypes.Array[ctypes.c_int64]] = {}  # Cached in C++

    def __call__(
        self, tokens: Tensor, pos: Tensor, caches: Sequence[CacheLayer], n_keys: int, *, listed: Listed | None = None,
        mass: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Store what tokens [B, T] at pos [B, T] bring, attend, and so on -> normed final states, bf16 [B, T, D].

        n_keys: see attention.dense; listed: what is read instead of the first n_keys entries, which then bound
        positions. mass: fp32 [L, B, K, n_keys // 16], written. IndexError for a token or a position that does not
        exist; then nothing was stored.
        """
        head_dim, first = 2 * len(self.freqs), caches[0]
        attend = attention.kernel_for(head_dim, torch.bfloat16, first.format)
        tokens, pos = tokens.contiguous(), pos.contiguous()
        assert tokens.shape == pos.shape and tokens.dtype == pos.dtype == torch.int64
        out = torch.empty(*tokens.shape, self.embedding.shape[1], dtype=torch.bfloat16, device="cpu")
        weights, cached = self._weights(), self._pointers(tokens, caches, listed)  # held until the call returns
        where = (False, 0, 0, None) if listed is None else listed.words()
        spent = None if self.watched is None else (_WORD * 3)()
        scales = (0, 0) if first.k_scale is None else first.k_scale.stride()[:2]
        call = _Call(
            len(caches), *tokens.shape, out.shape[-1], self.n_heads, self.n_kv_heads, head_dim, len(self.embedding),
            first.k.shape[2], *first.k.stride()[:2], *scales, first.tail, first.fine,
            attention.DTYPES[first.format.dtype], n_keys, *where[:3], tokens.data_ptr(), pos.data_ptr(), where[3],
            self.embedding.data_ptr(), self.norm.data_ptr(), self.freqs.data_ptr(), ctypes.cast(attend, _POINTER),
            ctypes.addressof(weights), ctypes.addressof(cached), out.data_ptr(),
            None if mass is None else mass.data_ptr(), None if spent is None else ctypes.addressof(spent),
            self.embedding_is_packed, torch.get_num_threads(), self.eps, self.rope_length,
        )  # fmt: skip
        wrong = library_of_layers().layers_any(ctypes.byref(call))
        if wrong == 3:
            raise MemoryError(f"no memory for a step of {tokens.numel():,} tokens")
        if wrong:
            what, most = (("token", len(self.embedding)), ("position", first.k.shape[2]))[wrong - 1]
            raise IndexError(f"a {what} is not among the {most} that there are")
        if spent is not None and self.watched is not None:
            products, attended, layers = (n * 1e-9 for n in spent)
            self.watched.append(Spent(tokens.shape[1], listed is not None, products, attended, layers))
        return out

    def _pointers(
        self, tokens: Tensor, caches: Sequence[CacheLayer], listed: Listed | None
    ) -> ctypes.Array[ctypes.c_int64]:
        """Cached in C++ for each layer; made, and looked at, when it is asked for first."""
        lists = listed.kv_indices if listed else [None] * len(caches)
        buffers = [x for cache in caches for x in cache.operands]
        held = *[x.data_ptr() for x in (*buffers, *lists) if x is not None], *[cache.window for cache in caches]
        k = caches[0].k
        key = held, k.shape, k.stride(), len(tokens), lists[0].shape if lists[0] is not None else None
        found = self._cached.get(key)
        if found is None:
            each = zip(caches, lists, strict=True)
            words = [
                word
                for cache, own in each
                for word in (*(0 if x is None else x.data_ptr() for x in (*cache.operands, own)), cache.window)
            ]
            _check(len(tokens), 2 * len(self.freqs), caches, len(self.layers), listed)
            if len(self._cached) > 8:
                self._cached.clear()
            found = self._cached[key] = (_WORD * len(words))(*words)
        return found

    def _weights(self) -> ctypes.Array[ctypes.c_int64]:
        """Layer in C++ for each layer; again, and looked at, if any tensor has moved.

        TypeError or ValueError for what the kernel would misread.
        """
        held = list(map(Tensor.data_ptr, self._held))
        if held != self._addresses:
            self._check_weights()
            words = [0 if x is None else x.data_ptr() for x in self._tensors]
            here, table = iter(words[3:]), list[int]()
            for layer in self.layers:
                table += [next(here) for _ in range(4)]
                for product in layer[4:]:
                    assert isinstance(product, Product)
                    packed, bias, scale, blocks = (next(here) for _ in range(4))
                    multiply = products.kernel_for(product.packed.dtype == torch.int8 or product.by_sums)
                    n_out, n_in = products.sizes_of(*product)
                    address = ctypes.cast(multiply, _POINTER).value or 0
                    way = products.IN_PLANES if products.in_planes(product.packed, product.blocks) else product.by_sums
                    table += [address, packed, blocks, scale, bias, n_in, n_out, way]
            assert len(table) == len(self.layers) * _WORDS_OF_A_LAYER
            self._addresses, self._table = held, (_WORD * len(table))(*table)
        return self._table

    def _check_weights(self) -> None:
        n_heads, n_kv, head_dim, dim = self.n_heads, self.n_kv_heads, 2 * len(self.freqs), self.embedding.shape[1]
        own, heads = len(self.layers[0].w_out.packed), (n_heads * head_dim, (n_heads + 2 * n_kv) * head_dim)
        ffn = products.sizes_of(*self.layers[0].w_out)[1]
        expected = [(heads[1], dim), (dim, heads[0]), (2 * ffn, dim), (own, ffn)]
        for layer in self.layers:
            sizes = [products.sizes_of(*product) for product in (layer.wqkv, layer.wo, layer.w_in, layer.w_out)]
            if sizes != expected or own != dim:
                raise ValueError(f"products of a layer are of {expected}, got {sizes}")
        of_width = [self.norm, *(norm for layer in self.layers for norm in (layer.attention_norm, layer.ffn_norm))]
        of_heads = [norm for layer in self.layers for norm in (layer.q_norm, layer.k_norm)]
        norms = [(x, n) for n, several in ((dim, of_width), (head_dim, of_heads)) for x in several if x is not None]
        narrow = [self.embedding, *(x for x, _ in norms)]
        wrong = any(x.dtype != torch.bfloat16 or not x.is_contiguous() for x in narrow)
        if wrong or any(x.shape != (n,) for x, n in norms) or self.freqs.dtype != torch.float32:
            raise TypeError("norms and embeddings of a stack are contiguous and bf16, frequencies fp32")


def _tensors(layer: LayerWeights) -> list[Tensor | None]:
    return [*layer[:4], *(x for product in layer[4:] for x in product[:4])]


def _check(n_rows: int, head_dim: int, caches: Sequence[CacheLayer], n_layers: int, listed: Listed | None) -> None:
    """What the kernel relies on, of buffers that it has not seen yet."""
    first = caches[0]
    assert len(caches) == n_layers and first.head_dim == head_dim
    assert all(x.k.stride() == x.v.stride() == first.k.stride() and x.k.shape == first.k.shape for x in caches)
    assert first.k.shape[0] == n_rows and first.k.stride(3) == 1 and first.k.stride(2) == first.k.shape[3]
    if listed:
        shape = listed.kv_indices[0].shape
        start = listed.window_start
        assert len(listed.kv_indices) == n_layers and start.shape == (n_rows,) and start.is_contiguous()
        assert start.dtype == torch.int64 and shape[:2] == first.k.shape[:2]
        assert all(x.shape == shape and x.is_contiguous() and x.dtype == torch.int64 for x in listed.kv_indices)
