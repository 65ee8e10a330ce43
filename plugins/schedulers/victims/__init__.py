"""Victim rules: who yields when KV blocks run out."""
