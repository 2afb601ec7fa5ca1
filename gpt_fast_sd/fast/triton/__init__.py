"""Kernels for CUDA, in Triton."""
