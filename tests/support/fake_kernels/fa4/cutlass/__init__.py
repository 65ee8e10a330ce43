"""A stand-in for nvidia-cutlass-dsl, which FlashAttention 4 needs."""
