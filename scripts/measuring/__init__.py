"""Measures an engine from above: it imports the engine's rooms, and none of them imports it."""

from measuring.report import Recorder, Way, page

__all__ = ["Recorder", "Way", "page"]
