"""Operators whose body is chosen by device: attention, selection, products."""
