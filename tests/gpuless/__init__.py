"""Proving CUDA code on a machine without a GPU: what can be interpreted, compiled, generated or replayed is checked."""
