"""Which block holds the KV of which tokens: full blocks by the SHA-256 of everything that their content depends on.

A block's key is SHA-256(parent's key, its token ids); the first block's parent is SHA-256(seed, adapter key, cache
salt), so that every key of a chain depends on them. The seed is random per process unless given: keys cannot be
precomputed from outside. The adapter's key says what its weights are (a digest of them, say), never a number or a name
that another process, or a later load, may give to other weights.
"""

from __future__ import annotations

import hashlib
import secrets
import struct

from ..request import Request

SEED_BYTES = 32


class PrefixIndex:
    """Content key -> block. One block per content: a second block with the same content is not indexed and never
    aliased.

    seed: at least 16 bytes, the same in processes that must agree on keys; None draws one.
    """

    def __init__(self, block_size: int, seed: bytes | None = None) -> None:
        if seed is not None and len(seed) < 16:
            raise ValueError(f"the prefix index needs a seed of at least 16 bytes, got {len(seed)}")
        self.block_size = block_size
        self.num_evictions = 0  # grows whenever a key is dropped: an earlier match may then be stale
        self.num_insertions = 0  # grows whenever one is added: an earlier match may then be too short
        self._seed = hashlib.sha256(seed if seed is not None else secrets.token_bytes(SEED_BYTES)).digest()
        self._pack_tokens = struct.Struct(f"<{block_size}q").pack
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def root_key(self, adapter_key: str, cache_salt: str | None) -> bytes:
        """The parent of a first block. adapter_key: "" is the base model. No salt and an empty salt are different."""
        adapter = adapter_key.encode("utf-8", "surrogatepass")
        salt = b"" if cache_salt is None else b"\x01" + cache_salt.encode("utf-8", "surrogatepass")
        return hashlib.sha256(self._seed + struct.pack("<q", len(adapter)) + adapter + salt).digest()

    def block_key(self, parent: bytes, token_ids: list[int]) -> bytes:
        """The key of a full block. Raises struct.error when there are not exactly block_size tokens."""
        return hashlib.sha256(parent + self._pack_tokens(*token_ids)).digest()

    def extend_keys(self, request: Request, num_blocks: int) -> None:
        """Fills request.block_hashes up to `num_blocks` full blocks of known tokens; each is computed once in a
        request's life.
        """
        keys = request.block_hashes
        if len(keys) >= num_blocks:
            return
        parent = keys[-1] if keys else self.root_key(request.adapter_key, request.cache_salt)
        for position in range(len(keys) * self.block_size, num_blocks * self.block_size, self.block_size):
            parent = self.block_key(parent, _known_tokens(request, position, position + self.block_size))
            keys.append(parent)

    def match(self, request: Request, start: int = 0) -> list[int]:
        """Blocks that hold the longest indexed prefix of the known tokens, from block `start` on.

        At most (known - 1) // block_size blocks: the last token is always computed, since its logits are wanted.
        """
        limit = (request.num_known_tokens - 1) // self.block_size
        self.extend_keys(request, limit)
        blocks = []
        for key in request.block_hashes[start:limit]:
            block = self._blocks.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, key: bytes, block: int) -> bool:
        """Indexes a computed block. False when its content is indexed already, under another block: that one is
        kept.
        """
        if key in self._blocks:
            return False
        if block in self._keys:
            raise ValueError(f"block {block} is indexed already, with other content")
        self._blocks[key] = block
        self._keys[block] = key
        self.num_insertions += 1
        return True

    def remove(self, block: int) -> None:
        """Forgets a block (evicted). Raises KeyError when it is not indexed."""
        del self._blocks[self._keys.pop(block)]
        self.num_evictions += 1

    def blocks(self) -> list[int]:
        """Every indexed block."""
        return list(self._keys)

    def faults(self) -> list[str]:
        """What is wrong between the two directions of the index; empty when nothing is. For integrity checks."""
        wrong = [
            f"key of block {block} leads to {self._blocks.get(key)}"
            for block, key in self._keys.items()
            if self._blocks.get(key) != block
        ]
        if len(self._keys) != len(self._blocks):
            wrong.append(f"{len(self._keys)} indexed blocks, {len(self._blocks)} keys")
        return wrong


def _known_tokens(request: Request, start: int, stop: int) -> list[int]:
    """Known tokens [start, stop), without joining prompt and outputs."""
    prompt, outputs = request.prompt_token_ids, request.output_token_ids
    num_prompt = len(prompt)
    if stop <= num_prompt:
        return prompt[start:stop]
    if start >= num_prompt:
        return outputs[start - num_prompt : stop - num_prompt]
    return prompt[start:] + outputs[: stop - num_prompt]
