"""The engine's kernels: attention, selection, products and sampling.

Operators in Triton, where `triton_serves`, are `decode_attention` (and with the mass of each page),
`prefill_attention`, `key_mass`, `sparse_attention`, for selection `top_pages`, `guided_select`, `page_bounds`,
`quest_pages`, and for tokens `likeliest`, which sorts on a CPU. `prepare_launches` does beforehand what Triton needs
for launching any of them, and `launches` says how many kernels one call launches. On a CPU C++ attends if
`cpu_attention_fits`.
For a CPU there is also `packed_linear`, products with bf16, int8 or int4 weights that `pack` or `pack_int4` has packed
(`int8_linear`, `int4_linear` and `int4_by_sums` in PyTorch, with weights from `quantize_rows` and `quantize_blocks`),
`Stack`, which runs all layers of a packed model in one call, `cpu_judge_greedy`,
`cpu_judge_sampled`, `cpu_draw` and `cpu_commit` for what a round does besides, and for large vocabularies
`cpu_distributions`. `begin_building` builds `cpu_kernels` in the background, with `vector_options` among Inductor's
options.
"""

from .cpu.attention_cpp import PAGE as MASS_PAGE
from .cpu.attention_cpp import cpu_attention_fits
from .cpu.build import begin_building, rebuilding, vector_options
from .cpu.instruction_sets import InstructionSet, chosen
from .cpu.layers import LayerWeights, Listed, Product, Spent, Stack, layers_build
from .cpu.linear import (
    LANES,
    LINE,
    cpu_kernels,
    kernels_are_built,
    pack,
    pack_int4,
    pack_planes,
    packable,
    packed_linear,
    packed_rows,
    packing_builds,
    unpack,
    unpack_int4,
    unpack_planes,
)
from .cpu.prebuild import build_kernel, kernels_to_build, sets_of_this_kind
from .cpu.round import cpu_commit, cpu_draw, cpu_judge_greedy, cpu_judge_sampled, cpu_uniform
from .cpu.sampling import cpu_distributions
from .ops.choice import triton_serves
from .ops.decode import decode_attention, decode_attention_with_mass, split_for
from .ops.filters import likeliest
from .ops.int4 import BLOCK, Int4, dequantize_blocks, int4_by_sums, int4_linear, power_between, quantize_blocks
from .ops.int8 import MOST_TILED, ROWS_AT_ONCE, int8_linear, quantize_rows
from .ops.launch_counts import launches
from .ops.prefill import (
    key_mass,
    prefill_attention,
    prefill_attention_of_slots,
    prefill_attention_with_lse,
    prefill_splits,
)
from .ops.select import guided_select, page_bounds, quest_pages, top_pages
from .ops.sparse import sparse_attention
from .triton.setup import prepare_launches
