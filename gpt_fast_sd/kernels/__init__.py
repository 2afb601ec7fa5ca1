"""The engine's kernels: attention, selection, products and sampling; each chooses the body that fits its tensors.

Attention: `decode_attention` (and with the mass of each page), `prefill_attention`, `key_mass`, `sparse_attention`.
Selection: `top_pages`, `guided_select`, `page_bounds`, `quest_pages` and, for tokens, `likeliest`. If `triton_serves`,
these are operators in Triton: `prepare_launches` does beforehand what Triton needs for launching any of them, and
`launches` says how many kernels one call launches. On a CPU they are C++ if `cpu_attention_fits`, else PyTorch.
For CPUs with AVX-512 bf16 dot products there are also `packed_linear` and `packed_swiglu`, products with weights that
`pack` has packed, and for large vocabularies `cpu_distributions` and `cpu_draw`. `begin_building` builds `cpu_kernels`
in the background, with `known_isa` among Inductor's options.
"""

from .choice import triton_serves
from .cpu import cpu_attention_fits
from .cpu_build import begin_building, known_isa
from .cpu_linear import cpu_kernels, pack, packable, packed_linear, packed_rows, packed_swiglu, unpack
from .cpu_sampling import cpu_distributions, cpu_draw, cpu_sampling_fits
from .decode import decode_attention, decode_attention_with_mass, split_for
from .filters import likeliest
from .launch_counts import launches
from .launching import prepare_launches
from .on_cpu import QUERY_BLOCK
from .prefill import (
    key_mass,
    prefill_attention,
    prefill_attention_of_slots,
    prefill_attention_with_lse,
    prefill_splits,
)
from .select import entries_of, guided_select, page_bounds, quest_pages, top_pages
from .sparse import sparse_attention

__all__ = [
    "QUERY_BLOCK",
    "begin_building",
    "cpu_attention_fits",
    "cpu_distributions",
    "cpu_draw",
    "cpu_kernels",
    "cpu_sampling_fits",
    "decode_attention",
    "decode_attention_with_mass",
    "entries_of",
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
    "prefill_attention_of_slots",
    "prefill_attention_with_lse",
    "prefill_splits",
    "prepare_launches",
    "quest_pages",
    "sparse_attention",
    "split_for",
    "top_pages",
    "triton_serves",
    "unpack",
]
