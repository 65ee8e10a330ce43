"""KV cache bookkeeping: block pool, prefix index, blocks in flight, and the manager of all three. No tensors here."""

from .block_pool import NULL_BLOCK, BlockPool, PoolIntegrityError
from .manager import KVCacheManager
from .pending import PendingBlocks
from .prefix_index import PrefixIndex

__all__ = ["NULL_BLOCK", "BlockPool", "KVCacheManager", "PendingBlocks", "PoolIntegrityError", "PrefixIndex"]
