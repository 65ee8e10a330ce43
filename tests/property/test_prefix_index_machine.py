"""Prefix index and KV cache manager against a dictionary of whole prefixes."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hotswap.core.kv_cache import KVCacheManager
from hotswap.core.kv_cache.prefix_index import PrefixIndex
from hotswap.core.request import Request
from hotswap.core.testing.scheduling_harness import fake_request

BLOCK_SIZE = 2
BASES = [[0] * 9, [0, 0, 0, 1] * 3, [1, 0] * 5]  # few, so that prefixes meet
Content = tuple[str, str | None, tuple[int, ...]]  # adapter, salt, every token up to the block's end


class PrefixIndexMachine(RuleBasedStateMachine):
    """Requests are admitted with their hits, computed, extended by outputs, released; the model knows what each block
    holds.
    """

    index_class: type[PrefixIndex] = PrefixIndex

    @initialize(num_blocks=st.integers(3, 12))
    def start(self, num_blocks: int) -> None:
        self.kv = KVCacheManager(num_blocks, BLOCK_SIZE, prefix_seed=b"machine's own seed")
        self.kv.index = self.index_class(BLOCK_SIZE, b"machine's own seed")
        self.kv.pool._on_evict = self.kv.index.remove
        self.live: dict[int, Request] = {}
        self.head: Request | None = None
        self.content: dict[int, Content] = {}  # block -> what a device would have written there
        self.next_id = 0

    def holds(self, request: Request, block_index: int) -> Content:
        tokens = (request.prompt_token_ids + request.output_token_ids)[: (block_index + 1) * BLOCK_SIZE]
        return request.adapter_key, request.cache_salt, tuple(tokens)

    def expected_match(self, request: Request) -> list[Content]:
        indexed = {self.content[block] for block in self.kv.index.blocks()}
        found = []
        for i in range((request.num_known_tokens - 1) // BLOCK_SIZE):
            if self.holds(request, i) not in indexed:
                break
            found.append(self.holds(request, i))
        return found

    @rule(
        prompt=st.builds(lambda base, n: base[:n], st.sampled_from(BASES), st.integers(1, 9)),
        salt=st.sampled_from([None, None, "", "a"]),
        adapter=st.sampled_from(["", "", "digest"]),
        outputs=st.lists(st.integers(0, 1), max_size=2),
    )
    def new_head(self, prompt: list[int], salt: str | None, adapter: str, outputs: list[int]) -> None:
        self.head = fake_request(self.next_id, prompt, cache_salt=salt, adapter_key=adapter)
        self.head.output_token_ids = list(outputs)
        self.next_id += 1

    @precondition(lambda self: self.head is not None)
    @rule()
    def admit(self) -> None:
        head = self.head
        assert head is not None
        hits = self.kv.match(head)
        expected = self.expected_match(head)
        if self.kv.num_blocks_to_take(hits, head.num_known_tokens) > self.kv.pool.num_free_blocks:
            return
        self.kv.open_table(head, hits, head.num_known_tokens)
        assert [self.content[block] for block in head.block_ids[: len(hits)]] == expected
        assert len(hits) * BLOCK_SIZE < head.num_known_tokens, "the last token is always computed"
        for i in range(len(hits), len(head.block_ids)):
            self.content[head.block_ids[i]] = self.holds(head, i)
        head.num_computed_tokens = len(hits) * BLOCK_SIZE
        self.live[head.request_id] = head
        self.head = None

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num_tokens=st.integers(0, 5))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        request.num_computed_tokens = min(request.num_known_tokens, request.num_computed_tokens + num_tokens)
        self.kv.index_computed(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def draw_token(self, data: st.DataObject, token: int) -> None:
        request = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        if request.num_known_tokens % BLOCK_SIZE == 0 and not self.kv.pool.num_free_blocks:
            return
        request.output_token_ids.append(token)
        self.kv.grow(request, request.num_known_tokens)
        last = len(request.block_ids) - 1
        self.content[request.block_ids[last]] = self.holds(request, last)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.kv.release(self.live.pop(data.draw(st.sampled_from(sorted(self.live)))), after=None)

    @rule()
    def reset(self) -> None:
        used = {block for request in self.live.values() for block in request.block_ids}
        assert self.kv.reset_prefix_cache() == (not used & set(self.kv.index.blocks()))
        assert set(self.kv.index.blocks()) <= used

    @invariant()
    def audit(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_integrity(self.live.values())
            if self.head is not None:  # looked at every step, as the head of a queue is
                hits = self.kv.match(self.head)
                assert [self.content[block] for block in hits] == self.expected_match(self.head)
            contents = [self.content[block] for block in self.kv.index.blocks()]
            assert len(set(contents)) == len(contents), "one block per content"


CHECKED = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = CHECKED


class Saltless(PrefixIndex):
    """Tenants share."""

    def root_key(self, adapter_key: str, cache_salt: str | None) -> bytes:
        return super().root_key(adapter_key, None)


class Adapterless(PrefixIndex):
    """Adapters share."""

    def root_key(self, adapter_key: str, cache_salt: str | None) -> bytes:
        return super().root_key("", cache_salt)


class EmptySaltIsNone(PrefixIndex):
    """An empty salt counts as none."""

    def root_key(self, adapter_key: str, cache_salt: str | None) -> bytes:
        return super().root_key(adapter_key, cache_salt or None)


class Parentless(PrefixIndex):
    """Keys of a block's own tokens only."""

    def block_key(self, parent: bytes, tokens: bytes) -> bytes:
        return super().block_key(b"", tokens)


@pytest.mark.parametrize("broken", [Saltless, Adapterless, EmptySaltIsNone, Parentless])
def test_machine_rejects_broken_index(broken: type[PrefixIndex]) -> None:
    machine = type("Machine", (PrefixIndexMachine,), {"index_class": broken})
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                CHECKED, max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False, database=None
            ),
        )
