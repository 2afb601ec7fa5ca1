"""Kernels behind torch operators: what the compiled steps attend with where torch's own bodies are slow.

Behind this door: `cpu_attention`, flash-decoding over bf16 keys for CPUs with AVX-512 bf16 dot products, dense,
with the attention mass of each page, or over listed entries; `cpu_attention_fits` says whether it can be used.
"""

from .cpu import PAGE, cpu_attention, cpu_attention_at, cpu_attention_fits, cpu_attention_with_mass

__all__ = ["PAGE", "cpu_attention", "cpu_attention_at", "cpu_attention_fits", "cpu_attention_with_mass"]
