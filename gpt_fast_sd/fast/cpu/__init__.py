"""Kernels for a CPU, in C++, and what builds and calls them."""
