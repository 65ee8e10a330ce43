"""Which block holds the KV of which tokens: full blocks by the SHA-256 of everything that their content depends on.

A block's key is SHA-256(parent's key, its token ids as little-endian 32-bit integers); the first block's parent is
SHA-256(seed, adapter key, cache salt), so that every key of a chain depends on them. The seed is random per process
unless given: keys cannot be precomputed from outside. The adapter's key says what its weights are (a digest of them,
say), never a number or a name that another process, or a later load, may give to other weights.

Keys are made when they are needed: a match makes few beyond its own end. Requests that come together often share a
prefix, so a prompt takes over the keys of the prompt before it as far as their tokens agree.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from itertools import repeat, takewhile

from ..request import Request
from .block_pool import NULL_BLOCK

SEED_BYTES = 32
TOKEN_BYTES = 4


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
        self._root: tuple[tuple[str, str | None], bytes] = ("", None), self.root_key("", None)  # the one asked for last
        # The last prompt to make keys: root, tokens, keys.
        self._recent: tuple[bytes, list[int], list[bytes]] = b"", [], []
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

    def block_key(self, parent: bytes, tokens: bytes) -> bytes:
        """The key of a full block. tokens: packed, TOKEN_BYTES each."""
        return hashlib.sha256(parent + tokens).digest()

    def extend_keys(self, request: Request, num_blocks: int) -> None:
        """Fills request.block_hashes up to `num_blocks` full blocks of known tokens; each is computed at most once in a
        request's life. Raises struct.error when fewer tokens are known, or one is outside 0..2**32 - 1.
        """
        keys = request.block_hashes
        if len(keys) >= num_blocks:
            return
        root, size = self._root_of(request), self.block_size
        keys += self._shared_keys(request, root, num_blocks)
        num_tokens = (num_blocks - len(keys)) * size
        if num_tokens:
            parent = keys[-1] if keys else root
            tokens = _known_tokens(request, len(keys) * size, num_blocks * size)
            packed = struct.pack(f"<{num_tokens}I", *tokens)
            for start in range(0, len(packed), size * TOKEN_BYTES):
                parent = self.block_key(parent, packed[start : start + size * TOKEN_BYTES])
                keys.append(parent)
            if num_blocks * size <= len(request.prompt_token_ids):
                self._recent = root, request.prompt_token_ids, keys

    def _root_of(self, request: Request) -> bytes:
        name = request.adapter_key, request.cache_salt
        if name != self._root[0]:
            self._root = name, self.root_key(*name)
        return self._root[1]

    def _shared_keys(self, request: Request, root: bytes, stop: int) -> list[bytes]:
        """Keys of the recent prompt that are this request's too, from its first missing one on and before `stop`."""
        recent_root, theirs, keys = self._recent
        mine, first, size = request.prompt_token_ids, len(request.block_hashes), self.block_size
        stop = min(stop, len(keys), len(theirs) // size, len(mine) // size)
        if first >= stop or root != recent_root or (first and keys[first - 1] != request.block_hashes[first - 1]):
            return []
        if mine[first * size : (first + 1) * size] != theirs[first * size : (first + 1) * size]:
            return []
        equal, unequal = first + 1, stop + 1  # so many first blocks are known to be equal; so many cannot all be
        while unequal - equal > 1:
            middle = (equal + unequal) // 2
            if mine[equal * size : middle * size] == theirs[equal * size : middle * size]:
                equal = middle
            else:
                unequal = middle
        return keys[first:equal]

    def match(self, request: Request, start: int = 0) -> list[int]:
        """Blocks that hold the longest indexed prefix of the known tokens, from block `start` on.

        At most (known - 1) // block_size blocks: the last token is always computed, since its logits are wanted. Keys
        are made in runs that double while they hit.
        """
        limit = (request.num_known_tokens - 1) // self.block_size
        blocks: list[int] = []
        if not self._blocks:
            return blocks
        keys, place = request.block_hashes, start
        while place < limit:
            if place >= len(keys):
                self.extend_keys(request, min(limit, 2 * place + 1))
            if keys[place] not in self._blocks:
                break
            blocks += takewhile(bool, map(self._blocks.get, keys[place:limit], repeat(NULL_BLOCK)))
            place = start + len(blocks)
        return blocks

    def has(self, key: bytes) -> bool:
        """Whether a block of this content is indexed."""
        return key in self._blocks

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
