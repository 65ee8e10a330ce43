"""Built-in loaders (checkpoint formats) and sources (where a model comes from)."""
