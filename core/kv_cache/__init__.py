"""KV cache bookkeeping: block pool, prefix index, and the manager that ties them to requests. No tensors here."""

from .block_pool import NULL_BLOCK, BlockPool, PoolIntegrityError
from .manager import KVCacheManager
from .prefix_index import PrefixIndex

__all__ = ["NULL_BLOCK", "BlockPool", "KVCacheManager", "PoolIntegrityError", "PrefixIndex"]
