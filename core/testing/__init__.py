"""Helpers for testing plugins and models. Nothing here is imported by a running engine."""
