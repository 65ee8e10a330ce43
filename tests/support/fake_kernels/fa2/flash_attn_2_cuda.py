"""A stand-in for the compiled part of FlashAttention 2."""
