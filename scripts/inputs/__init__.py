"""Prompts as others publish them, and RULER's tasks made anew."""
