"""Minimal complete plugins, one per kind: what `hotswap plugins new` writes and what the docs pages show."""
