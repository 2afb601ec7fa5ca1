"""Weights in fewer bits: which precisions there are, and how a model is quantized."""
