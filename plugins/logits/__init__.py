"""Logits processors: changes to logits before a token is drawn."""
