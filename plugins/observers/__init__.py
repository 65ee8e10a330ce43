"""Observers: they hear what the engine does and change nothing."""
