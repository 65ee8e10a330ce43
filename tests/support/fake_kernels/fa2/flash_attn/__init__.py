"""A stand-in for FlashAttention 2: its call, its checks, plain torch."""

from .flash_attn_interface import flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func"]
