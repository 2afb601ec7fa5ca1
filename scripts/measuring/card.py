"""Figures of a run's statistics, as cards show them."""

from __future__ import annotations

from gpt_fast_sd.serving.stats import EngineStats


def time_split(stats: EngineStats) -> dict[str, str]:
    """The shares of decoding time, in percent."""
    parts = {"draft": stats.draft_seconds, "verify": stats.verify_seconds}
    if stats.device_seconds:  # rounds were captured: nobody knows their parts
        parts = {"rounds on the device": stats.device_seconds}
    seconds = {**parts, "host": stats.host_seconds}
    return {part: f"{over(value, stats.decode_seconds):.0%}" for part, value in seconds.items()}


def over(a: float, b: float) -> float:
    return a / b if b else 0.0
