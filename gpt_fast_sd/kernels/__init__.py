"""Kernels behind torch operators: what the compiled steps attend and select with where torch's own are slow.

For CPUs with AVX-512 bf16 dot products `cpu_attention`: flash-decoding, dense, with the attention mass of each page, or
over listed entries; `cpu_attention_fits` says whether it can be used; `packed_linear`, `packed_swiglu`, products with
weights that `pack` has packed; and for large vocabularies `cpu_distributions` and `cpu_draw`. `begin_building` builds
`cpu_kernels` beside whatever comes next, with `known_isa` among Inductor's options. For CUDA, in Triton:
`decode_attention` (and with the mass of each page), `prefill_attention`, `key_mass`, `sparse_attention`, and what
selects: `top_pages`, `guided_select`, `page_bounds`, `quest_pages`, and of tokens `likeliest`. On CPU tensors these are
references with the same results, most of them slow. `prepare_launches` does beforehand what Triton needs for launching
any of them, and `launches` says how many kernels a call of one launches.
"""

from .cpu import PAGE, cpu_attention, cpu_attention_at, cpu_attention_fits, cpu_attention_with_mass
from .cpu_build import begin_building, known_isa
from .cpu_linear import cpu_kernels, pack, packable, packed_linear, packed_rows, packed_swiglu, unpack
from .cpu_sampling import cpu_distributions, cpu_draw, cpu_sampling_fits
from .decode import decode_attention, decode_attention_with_mass, split_for
from .filters import likeliest
from .launch_counts import launches
from .launching import prepare_launches
from .prefill import key_mass, prefill_attention, prefill_attention_with_lse, prefill_splits
from .select import guided_select, page_bounds, quest_pages, top_pages
from .sparse import sparse_attention

__all__ = [
    "PAGE",
    "begin_building",
    "cpu_attention",
    "cpu_attention_at",
    "cpu_attention_fits",
    "cpu_attention_with_mass",
    "cpu_distributions",
    "cpu_draw",
    "cpu_kernels",
    "cpu_sampling_fits",
    "decode_attention",
    "decode_attention_with_mass",
    "guided_select",
    "key_mass",
    "known_isa",
    "launches",
    "likeliest",
    "pack",
    "packable",
    "packed_linear",
    "packed_rows",
    "packed_swiglu",
    "page_bounds",
    "prefill_attention",
    "prefill_attention_with_lse",
    "prefill_splits",
    "prepare_launches",
    "quest_pages",
    "sparse_attention",
    "split_for",
    "top_pages",
    "unpack",
]
