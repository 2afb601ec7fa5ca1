"""How much temporary memory the steps of an engine take at most: prefilling, rounds, observing, and quantizing.

Shapes: B slots, T tokens in a call, S cache capacity, L layers, N query heads, K kv heads, H head dim, D model width,
F feed-forward width, V vocabulary, W windows, gamma tokens drafted per round.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gpt_fast_sd.model import SPLIT, ModelConfig

from ..attention import QUERY_BLOCK
from ..fast import LANES, MOST_TILED, ROWS_AT_ONCE, prefill_splits, split_for
from ..fast.devices import traits_of
from ..fast.ops.int4_tiles import parts_of
from ..policies import registry
from ..policies.config import DraftConfig
from ..prefill import CHUNK
from ..quantization.table import matrices_of, precision
from .system import System

# fp32 tensors of a size that are alive at a time while rows sample and filter, the most that tests count:
FILTERING = 5  # as large as a step's logits [B, T, V], while distributions are made from them and used to judge
FILTERING_BY_SORT = 8  # the same if `likeliest` sorts, as its body for a CPU does
DRAWING_ALONE = 6  # as large as [B, V], while one token per row is drawn and nothing was drafted
DRAWING = 9  # as large as [B, V], while one token per row is drawn: in fp64, from the residual of p and q

WIDENED = CHUNK // 4  # tokens of a given text whose logits are widened at a time
SCORES = 4  # as large as scores [B, N, T, S], with the weights made from them
LOOKUP = 20  # bytes per token of the texts that are searched


@dataclass(frozen=True)
class Workspace:
    """Roughly the bytes that a part of the work holds at a time, besides weights, caches and selections."""

    system: System  # of one rank

    @property
    def total(self) -> int:
        """Any part of the work, building the engine included."""
        system, packing, quantizing = self.system, 0, 0
        if system.packs:  # a copy of one weight, in bf16
            packing = 2 * max(_largest_weight(model) for model, _ in system.shapes)
        for name in filter(None, (system.config.quantize, system.draft.quantize)):
            beside = precision(name, system.device).beside
            quantizing = max(quantizing, *(_quantizing(model, beside) for model, _ in system.shapes))
        steps = max(self.prefilling, self.scoring, self.round, self.observing)
        return max(steps + self.widened, packing, quantizing)

    @property
    def captured(self) -> int:
        """What rounds are captured with."""
        return max(self.round, self.observing) + self.widened

    @property
    def prefilling(self) -> int:
        """The largest chunk of a prompt."""
        longest = max(self.system.config.max_seq_len, SPLIT)
        chunks = [n for n in traits_of(self.system.device).chunks if n <= longest]
        return max(n * self._token + self._parts(1, n) + self._scores(1, n) for n in chunks)

    @property
    def scoring(self) -> int:
        """A chunk of a given text, its logits, and some of these in fp32, twice (see serving/scoring.py)."""
        vocab = self.system.model.vocab_size
        logits = (CHUNK * self.system.dtype.itemsize + WIDENED * 2 * 4) * vocab
        attending = max(self._parts(1, n) + self._scores(1, n) for n in (CHUNK, WIDENED))
        return CHUNK * self._token + logits + attending

    @property
    def round(self) -> int:
        """Drafting, the target's widest step, judging, and selecting by its attention mass."""
        draft, model, b, capacity = self._sizes
        triton, width = self.system.in_triton, draft.max_gamma + 1
        row = b * model.vocab_size * 4  # fp32 [B, V]
        # a hierarchy's middle steps judge, too, and may draft too much
        cheap: int = registry.policy_class(draft.policy).extra_tokens
        judged = max(width, 1 + cheap)
        logits = judged * row  # fp32 [B, T, V]
        # the distributions of drafts, fp32 [B, gamma, V] and more
        drafted = (width + cheap) * row if draft.max_gamma else 0
        wide = FILTERING if triton else FILTERING_BY_SORT
        # p of every place; q, too, one-hot for deterministic drafts
        judging = logits + max(wide * judged, 2 * (judged - 1) + DRAWING if judged > 1 else DRAWING_ALONE) * row
        attending, mass = self._scores(b, judged), 0
        if triton:  # partial results of one layer's splits, fp32
            splits = -(-capacity // split_for(capacity, b * model.n_kv_heads))
            attending = b * model.n_heads * judged * (model.head_dim + 2) * 4 * splits
        if draft.view_name and registry.view_class(draft.view_name).wants_mass:
            # for the mass, a layer's sums per block of keys and query
            pages = capacity // draft.page
            mass = 2 * model.n_layers * b * model.n_kv_heads * pages * 4 + 2 * b * model.n_heads * width * pages * 4
        step = b * judged * self._token + 2 * logits + attending  # logits as the model has them, and as fp32
        # each row's text, as windows that are compared with its end
        searches = registry.policy_class(draft.policy).searches(draft)
        searched = LOOKUP * b * capacity if searches else 0
        return drafted + mass + max(step, judging, searched)

    @property
    def observing(self) -> int:
        """A view's passes over windows of several rows, and their selections."""
        draft, model, b, capacity = self._sizes
        n_observed: int = registry.view_class(draft.view_name).n_observed if draft.view_name else 0
        if not n_observed:
            return 0
        w, n, k, h = min(b, traits_of(self.system.device).windows), model.n_heads, model.n_kv_heads, model.head_dim
        chosen = 3 * model.n_layers * w * k * draft.budget * 8  # the old ones, the new ones, and those kept
        # fp32 [W, K, S]: the mass, the part of it before the window, and its averages
        scores = 3 * w * k * capacity * 4
        if self.system.in_triton:  # of one layer, whose queries are widened to all slots
            attending = 3 * b * n * n_observed * (h + 1) * 4 + self._parts(b, n_observed) + b * k * capacity * 4
        else:  # of one layer, a copy of the keys and values, scores, and places to sort
            attending = w * capacity * (2 * k * h * 4 + 2 * k * 8) + self._scores(w, n_observed)
        return w * n_observed * self._token + attending + scores + chosen

    def _parts(self, n_rows: int, n_tokens: int) -> int:
        """For attention of chunks or windows over all keys, if CUDA splits these."""
        if not self.system.in_triton:
            return 0
        model = self.system.model
        splits = prefill_splits(model.group_size * n_tokens, self.system.capacity)
        return n_rows * model.n_heads * n_tokens * (model.head_dim + 1) * 4 * splits

    def _scores(self, n_rows: int, n_tokens: int) -> int:
        """For attention in plain PyTorch, a few queries at a time over all keys: fp32 [B, N, T, S].

        Keys and values that are quantized are widened first, to fp32 at most; planes are put together before.
        """
        system, model = self.system, self.system.model
        if system.in_triton:
            return 0
        widened = 2 * model.n_kv_heads * model.head_dim * (system.format.scaled + system.format.planes)
        scores = SCORES * model.n_heads * min(n_tokens, QUERY_BLOCK)
        return n_rows * system.capacity * (scores + widened) * 4

    @property
    def widened(self) -> int:
        """A copy of one quantized weight, where a product makes one, or an int4 product by parts of its inputs."""
        system, most = self.system, _widened_head(self.system)
        for name in filter(None, (system.config.quantize, system.draft.quantize)):
            each = precision(name, system.device).widened
            most = max(most, *(each * _largest_of_layers(*shape, system.packs) for shape in system.shapes))
            if name == "int4" and system.in_triton:
                n_rows = max(MOST_TILED, system.config.batch_size * (1 + system.draft.max_gamma))
                sizes = itertools.chain(*(matrices_of(*shape).values() for shape in system.shapes))
                most = max(most, 4 * n_rows * max(parts_of(n_out, n_in) * n_out for n_out, n_in in sizes))
        return most

    @property
    def _token(self) -> int:
        """For each token that is fed, in one layer."""
        model, ranks = self.system.model, self.system.ranks
        row = model.dim * 4 + (model.n_heads + 2 * model.n_kv_heads) * model.head_dim * 2 + model.ffn_dim * 3
        # every rank's part, the sum, and the next part in fp32 with its result
        gathered = (ranks + 3) * model.dim if self.system.config.exact and ranks > 2 else 0
        return (row + gathered) * 4

    @property
    def _sizes(self) -> tuple[DraftConfig, ModelConfig, int, int]:
        """The draft, the target, B and S."""
        return self.system.draft, self.system.model, self.system.config.batch_size, self.system.capacity


def _largest_weight(model: ModelConfig) -> int:
    """Elements of the largest matrix that tokens are multiplied by; a rank's head is not larger."""
    heads = (model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    return model.dim * max(model.vocab_size, 2 * model.ffn_dim, heads)


def _largest_of_layers(model: ModelConfig, ranks: int, packs: bool) -> int:
    """Elements of the largest matrix that is quantized and, where weights are packed, has no size for that."""
    sizes = matrices_of(model, ranks).values()
    return max((rows * columns for rows, columns in sizes if not (packs and rows % LANES == 0)), default=0)


def _widened_head(system: System) -> int:
    """Bytes of the largest output head of a copy that drafts, as a product of many rows widens it."""
    draft, b = system.draft, system.config.batch_size
    if draft.quantize is None:
        return 0
    head = precision(precision(draft.quantize, system.device, of_draft=True).head, system.device)
    if head.shares:  # the target's own, too, which scores many tokens
        model = system.model
        return 0 if model.tie_embeddings else head.widened * -(-model.vocab_size // system.ranks) * model.dim
    many = [(step.model, ranks) for step, ranks in system.draft_steps() if b * step.n_tokens > MOST_TILED]
    return head.widened * max((-(-model.vocab_size // ranks) * model.dim for model, ranks in many), default=0)


def _quantizing(model: ModelConfig, beside: int) -> int:
    """Bytes of what is there at a time while a matrix is quantized: itself in bf16, and some rows of it in fp32."""
    widest = max(model.dim, model.ffn_dim, model.n_heads * model.head_dim)
    return 2 * _largest_weight(model) + 4 * beside * ROWS_AT_ONCE * widest
