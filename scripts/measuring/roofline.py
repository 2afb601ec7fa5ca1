"""The least cost of a step: bytes and operations over a chip's rates, and the gain of drafting that follows.

A step of T tokens per row reads all weights of the linear layers once, and each row's keys and values once; the two
groups run one after the other, so their times add, and inside a group reading and arithmetic overlap, so the longer
one counts (Williams et al. 2009, "Roofline"; for speculation MagicDec, arXiv 2408.11049):

    W     = weight_bytes P / tp                  P = L (2 D H (N + K) + 3 D F) + V D, the embedding table is looked up;
                                                 the head's V D have head_bytes each, which int8 leaves as they were
    KV    = 2 L K H kv_bytes context B / tp      K / tp at least 1, when ranks share a head
    F_lin = 2 P B T / tp                         F_att = 4 L N H context B T / tp
    T(T, context) = max(W / bandwidth, F_lin / peak) + max(KV / bandwidth, F_att / peak) + fixed costs + collectives

Where only some layers attend to everything the others count for a window, where a layer has experts those that are
read by the tokens of all rows, and where the cache lies behind a link plain decoding and verification wait for that.

Three sets of rates and fixed costs: the ideal, what good public kernels reach, and what is expected of ours, by what
one H200 took for steps of 16 rows (benchmarks/h200).

Shapes: B batch rows, T tokens of each in this step, L layers, D width, F feed-forward width, N query heads, K kv heads,
        H head dim, V vocabulary, gamma tokens drafted per round, alpha the chance that a draft is accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpt_fast_sd.fast import MOST_TILED, launches, split_for
from gpt_fast_sd.model import ModelConfig
from gpt_fast_sd.tp import collectives_per_step
from measuring.chips import Chip, Ranks

MOST = 24  # drafts per round that best_gamma considers


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of a chip's rates that kernels reach, and fixed costs in seconds."""

    linear_bandwidth: float = 1.0
    linear_peak: float = 1.0
    attention_bandwidth: float = 1.0
    attention_peak: float = 1.0
    layer_seconds: float = 0.0  # of a layer, whatever it reads: latency of its attention, gaps
    kernel_seconds: float = 0.0  # per kernel: the gap before it, and the time of a small one
    step_seconds: float = 0.0  # sampling, judging, launching
    judge_seconds: float = 0.0  # judging, commit and selection of a round
    splits: bool = False  # whether the sums of flash-decoding's splits, written and read again, are counted
    mass_cost: float = 1.0  # of a byte of the mass of pages, in bytes of keys: what sums and scatters it takes longer
    overlap: float = math.inf  # p: in attention bytes of b seconds and sums of f take (b ** p + f ** p) ** (1 / p)
    narrow: Mapping[str, float] = field(default_factory=dict, hash=False)  # see PUBLISHED; of others: 1.0
    narrow_peak: Mapping[str, float] = field(default_factory=dict, hash=False)  # share of the peak; of others as any
    most_tiled: float = math.inf  # rows; more of them are multiplied with copies of int8 weights in 16 bits


IDEAL = Efficiency()
# What good public kernels reach: FlashInfer's and TileLang's on Hopper, in a CUDA graph. Quantized products of one row
# by the tokens/s of Llama-3.1-8B on an H100 in torchao 0.8's quantization/README.md, less a millisecond of the rest.
PUBLISHED = {"int8": 0.855, "float8": 0.63, "int4": 0.615}
PRACTICAL = Efficiency(
    linear_bandwidth=0.85, linear_peak=0.70, attention_bandwidth=0.80, attention_peak=0.45,
    layer_seconds=6e-6, step_seconds=60e-6, narrow=PUBLISHED,
)  # fmt: skip
# What is expected of ours: the kernels of steps that one H200 ran, Llama-3.1-8B in bf16, 15 or 16 rows of 57,344 (a
# profile of each; the steps themselves: benchmarks/h200). Other chips may be farther from their data sheets.
# - products of bf16 take 4.03 ms, of both planes 6.6 (12.4 of 128 rows), of float8 2.31 and what makes rows float8 0.4
#   to 0.5, of int8 some 3.9 (its kernel alone); int4's, which was not timed, is taken to reach its bandwidth,
#   and half of the 390 TFLOP/s of its tiles, as each group is multiplied twice;
# - dense attention of one query reads 4.57 TB/s in its splits; 6 and 9 take 6 and 7 % longer, with mass 9 more;
# - 423 to 457 kernels of a step take 0.5 to 0.9 ms beside these, judging 0.08, selecting 0.27.
MEASURED = {"int8": 0.51, "float8": 0.72, "int4": 0.51, "planes": 0.72, "both planes": 0.61}  # which a target reads
EXPECTED = Efficiency(
    linear_bandwidth=0.78, linear_peak=0.60, attention_bandwidth=0.95, attention_peak=0.45, kernel_seconds=1e-6,
    layer_seconds=10e-6, judge_seconds=0.35e-3, splits=True, mass_cost=3.5, overlap=2.0, narrow=MEASURED,
    narrow_peak={"int4": 0.2, "both planes": 0.16}, most_tiled=MOST_TILED,
)  # fmt: skip

# Kernels that a step launches. Besides its attention a layer has eight: the products wqkv, wo, w_in and w_out, two
# norms, rope with the cache writes, SwiGLU. Before it reads its list, quest counts, scores, weighs and cuts pages,
# records and lists them.
BESIDE_ATTENTION = 8
OVER_A_LIST = launches("sparse_attention", n_entries=10**6)
ATTENTION_KERNELS = {
    "dense": launches("decode_attention"), "mass": launches("decode_attention_with_mass"), "sparse": OVER_A_LIST,
    "quest": launches("quest_pages") + 2 + OVER_A_LIST,
}  # fmt: skip
HEAD_KERNELS = 4  # cosines, the embedding with the first norm; the product with the vocabulary, logits to fp32


def kernels(config: ModelConfig, attention: str = "dense", more: int = 0) -> int:
    """Kernels of one step, attention one of ATTENTION_KERNELS, any other over a list; more: of each layer."""
    own = ATTENTION_KERNELS.get(attention, OVER_A_LIST)
    copies = math.ceil((config.n_layers + 1) / 8) if attention == "mass" else 0  # of eight layers; the head is one, too
    return config.n_layers * (BESIDE_ATTENTION + own + more) + copies + HEAD_KERNELS


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The bytes and operations of one step on each of tp chips."""

    weight_bytes: float
    kv_bytes: float
    linear_flops: float
    attention_flops: float


def linear_params(config: ModelConfig) -> int:
    """P, the parameters that every step multiplies by: the matrices of the layers and the output's."""
    attention = 2 * config.dim * config.head_dim * (config.n_heads + config.n_kv_heads)
    return config.n_layers * (attention + 3 * config.dim * config.ffn_dim) + config.vocab_size * config.dim


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all steps of a run have in common.

    weight_bytes, kv_bytes: bytes of one weight, and of one element of a key or value (2 for bf16). head_bytes: of one
    weight of the output; None: like any other. precision: of quantized weights, by name. more_kernels: of a layer whose
    cache is of bytes. ranks: chips that hold the model together. efficiency: what kernels reach.
    full_layers: layers that attend to everything, None: as the model says; the others read a window (0: no keys).
    beside: entries of a layer that are read and not attended to, as bounds are; with full_layers of these alone.
    experts: of a layer's feed-forward part, and how many of them a token has. kv_link: bytes per second of what stands
    between the chip and the whole cache, whose part for drafts it holds itself.
    """

    weight_bytes: float = 2.0
    head_bytes: float | None = None
    kv_bytes: float = 2.0
    precision: str | None = None
    more_kernels: int = 0
    ranks: Ranks | None = None
    efficiency: Efficiency = IDEAL
    full_layers: int | None = None
    window: int = 0
    beside: float = 0.0
    experts: tuple[int, int] | None = None
    kv_link: float | None = None

    def entries(self, config: ModelConfig, context: float) -> float:
        """Entries that a row's query reads in all layers, for each kv head, attended to or not."""
        if (full := self.full_layers) is None:
            return sum(min(context, window or context) + self.beside for window in config.windows)
        return full * (context + self.beside) + (config.n_layers - full) * min(context, self.window)

    def experts_read(self, n_tokens: float) -> float:
        """Experts of a layer that some of n_tokens has, each of which has its own: expected."""
        if self.experts is None:
            return 1.0
        n, own = self.experts
        return float(n * (1 - (1 - own / n) ** n_tokens))

    @property
    def tp(self) -> int:
        return self.ranks.n if self.ranks else 1

    @property
    def of_head(self) -> float:
        return self.weight_bytes if self.head_bytes is None else self.head_bytes


AS_IT_IS = Conditions()


def step_cost(config: ModelConfig, batch: int, n_tokens: int, context: float, under: Conditions = AS_IT_IS) -> StepCost:
    """The cost of feeding n_tokens to each of batch rows that attend to `context` entries each."""
    params, head = linear_params(config), config.vocab_size * config.dim
    entries = under.entries(config, context) * batch
    expert = config.n_layers * 3 * config.dim * config.ffn_dim  # one of each layer, which params has
    read = params + expert * (under.experts_read(batch * n_tokens) - 1)
    used = params + expert * ((under.experts or (1, 1))[1] - 1)
    n_kv_heads = max(1.0, config.n_kv_heads / under.tp)  # per rank: with fewer of them than ranks some hold the same
    return StepCost(
        weight_bytes=(under.weight_bytes * (read - head) + under.of_head * head) / under.tp,
        kv_bytes=2 * config.head_dim * n_kv_heads * under.kv_bytes * entries,
        linear_flops=2 * used * batch * n_tokens / under.tp,
        attention_flops=4 * config.head_dim * config.n_heads * entries * n_tokens / under.tp,
    )


def step_seconds(
    config: ModelConfig, chip: Chip, batch: int, n_tokens: int, context: float, under: Conditions = AS_IT_IS, *,
    mass_page: int = 0, attention: str = "dense",
) -> float:  # fmt: skip
    """Seconds of such a step: plain decoding with n_tokens 1, verification with gamma + 1, a draft with its budget.

    mass_page: keys of a page whose attention mass is summed, too, or 0. attention: see kernels.
    """
    e, size = under.efficiency, (config, batch, n_tokens, context)
    # many rows take copies, which a library reads
    if under.precision in ("int8", "int4", "both planes") and batch * n_tokens > e.most_tiled:
        under = replace(under, precision=None, weight_bytes=under.weight_bytes + 4, more_kernels=under.more_kernels + 4)
    cost = step_cost(*size, under)
    whole = bool(mass_page) or attention == "dense"  # split as a cache of so many entries is; else a list
    split = split_for(math.ceil(context), batch * max(1, config.n_kv_heads // under.tp)) if whole else 2048
    of = config, batch * n_tokens, under.entries(config, context)
    handed_on = (merged_bytes(*of, split) + e.mass_cost * mass_bytes(*of, mass_page)) / under.tp if e.splits else 0
    linear, attend = _seconds(cost, chip, under, handed_on, link=under.kv_link if whole else None)
    return linear + attend + fixed_seconds(config, batch * n_tokens, under, "mass" if mass_page else attention)


def fixed_seconds(config: ModelConfig, n_tokens: int, under: Conditions, attention: str = "dense") -> float:
    """Seconds of a step beside its products and attention: gaps, latencies and collectives."""
    e, gaps = under.efficiency, kernels(config, attention, under.more_kernels) * under.efficiency.kernel_seconds
    return gaps + config.n_layers * e.layer_seconds + e.step_seconds + collective_seconds(config, n_tokens, under)


def collective_seconds(config: ModelConfig, n_tokens: int, under: Conditions) -> float:
    """Seconds of the collectives of a step over n_tokens of all rows."""
    if under.ranks is None:
        return 0.0
    counts, row = collectives_per_step(config, under.tp), config.dim * max(under.of_head, 2.0)  # 16 bits or more
    best = counts.get("all_gather", 0) * under.ranks.all_reduce(8.0 * n_tokens)  # of a part, and its logit
    return counts.get("all_reduce", 0) * under.ranks.all_reduce(row * n_tokens) + best


def _seconds(
    cost: StepCost, chip: Chip, under: Conditions, handed_on: float = 0.0, link: float | None = None
) -> tuple[float, float]:
    """Seconds of linear layers and of attention, which also moves what is handed on: the longest of bytes and sums.

    link: what the keys and values come over.
    """
    e = under.efficiency
    rate = chip.bandwidth * e.linear_bandwidth * e.narrow.get(str(under.precision), 1.0)
    peak = chip.peak * e.narrow_peak.get(str(under.precision), e.linear_peak)
    linear = max(cost.weight_bytes / rate, cost.linear_flops / peak)
    reading = (cost.kv_bytes + handed_on) / (chip.bandwidth * e.attention_bandwidth)
    adding = cost.attention_flops / (chip.peak * e.attention_peak)
    longest = max(reading, adding)
    both = longest if math.isinf(e.overlap) else (reading**e.overlap + adding**e.overlap) ** (1 / e.overlap)
    return linear, max(both, cost.kv_bytes / link if link else 0.0)


def merged_bytes(config: ModelConfig, n_tokens: int, entries: float, split: int) -> float:
    """Bytes of partial results that flash-decoding writes and reads again: of a split an fp32 row and sum per query."""
    return 2 * 4 * config.n_heads * n_tokens * (config.head_dim + 1) * entries / split


def mass_bytes(config: ModelConfig, n_tokens: int, entries: float, page: int, block: int = 64) -> float:
    """Bytes of the mass of pages: per query an fp16 sum of every page, an fp32 maximum of every block of keys."""
    return 2 * config.n_heads * n_tokens * (2 / min(page, block) + 4 / block) * entries if page else 0.0


def refresh_seconds(
    config: ModelConfig, chip: Chip, batch: int, context: int, tokens: float, under: Conditions = AS_IT_IS, *,
    every: int, n_observed: int, reads: float, at_once: int,
) -> float:  # fmt: skip
    """Seconds of refreshing selections, per round in which each of batch rows grows by this many tokens.

    A selection becomes stale as its row grows: after `every` tokens the last n_observed ones are fed again. reads: of
    keys and values; keys twice and values once are 1.5. at_once: rows that share one reading of the weights.
    """
    rows = min(at_once, batch)
    linear, attention = _seconds(step_cost(config, rows, n_observed, context, under), chip, under, link=under.kv_link)
    passes = batch * tokens / every / rows  # per round
    return passes * (linear + reads * attention + fixed_seconds(config, rows * n_observed, under))


def omega(gamma: int, alpha: float | Sequence[float]) -> float:
    """Expected tokens per round of gamma drafts, its bonus token included.

    One alpha: (1 - alpha ** (gamma + 1)) / (1 - alpha) (Leviathan et al. 2023, arXiv 2211.17192). Several: those of the
    first, second, ... draft of a round, each given that all before it were accepted; the last one holds for all after.
    """
    chances = [alpha] if isinstance(alpha, (int, float)) else list(alpha)
    total = share = 1.0
    for i in range(gamma):
        share *= chances[min(i, len(chances) - 1)]
        total += share
    return total


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The cost and gain of rounds of gamma drafts."""

    gamma: int
    tokens: float  # per round, omega
    target_seconds: float  # T_T, a step of plain decoding
    draft_seconds: float  # T_D, one draft step
    verify_seconds: float  # T_V, the target's step over gamma + 1 tokens
    select_seconds: float  # per round, for judging and for choosing what to read

    @property
    def round_seconds(self) -> float:
        """gamma T_D + T_V + T_select."""
        return self.gamma * self.draft_seconds + self.verify_seconds + self.select_seconds

    @property
    def ratio(self) -> float:
        """Speed over plain decoding: omega T_T / (gamma T_D + T_V + T_select)."""
        return self.tokens * self.target_seconds / self.round_seconds


def best_gamma(forecast: Callable[[int], Forecast], gammas: Iterable[int] = range(MOST + 1)) -> Forecast:
    """The forecast(gamma) with the highest ratio; ties go to the fewest drafts."""
    return max((forecast(gamma) for gamma in sorted(gammas)), key=lambda one: one.ratio)
