"""Requests, slots and rounds over time: what keeps the device busy, and counts it."""

from .penalties import Penalties

__all__ = ["Penalties"]
