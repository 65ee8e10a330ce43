"""S-50 to S-53: nothing of one request reaches another, neither through cached prefixes nor through the batch."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hotswap import SamplingParams
from hotswap.core.kv_cache.manager import KVCacheManager
from hotswap.core.kv_cache.prefix_index import SEED_BYTES, PrefixIndex
from hotswap.core.testing.scheduling_harness import fake_request
from hotswap.core.testing.tiny_models import make_tiny_model

if TYPE_CHECKING:
    from hotswap.core.engine.llm import LLM

SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 200,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 8,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def make_llm(tiny: Path) -> Iterator[Callable[..., LLM]]:
    from hotswap import LLM as make

    engines: list[LLM] = []

    def build(**settings: Any) -> LLM:
        engines.append(make(str(tiny), **{**SMALL, **settings}))
        return engines[-1]

    yield build
    for engine in engines:
        engine.shutdown()


class Run:
    """Requests stepped to their end on an offline engine; what each got, by engine request id."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.core: Any = llm._engine.core
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.cached: dict[int, int] = {}
        self.keys: dict[int, set[bytes]] = {}

    def add(self, ids: list[int], salt: str | None = None, **fields: Any) -> int:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **fields})
        first = None
        for request in self.llm._front.inputs.process(list(ids), params, cache_salt=salt):
            refusal = self.core.add_request(request)
            assert refusal is None, refusal
            self.tokens[request.request_id], self.logprobs[request.request_id] = [], []
            first = first or request.request_id
        assert first is not None
        return first

    def step(self) -> None:
        if not self.core.has_work():
            return
        for update in self.core.step():
            self.tokens[update.request_id] += update.new_token_ids
            for position in update.logprobs or ():
                self.logprobs[update.request_id].append((position.token_ids, position.logprobs, position.ranks))
            self.cached[update.request_id] = max(self.cached.get(update.request_id, 0), update.num_cached_tokens)
        for request in list(self.core.mechanism.running):
            self.keys.setdefault(request.request_id, set()).update(request.block_hashes)

    def finish(self) -> None:
        while self.core.has_work():
            self.step()

    def one(self, ids: list[int], salt: str | None = None, **fields: Any) -> int:
        number = self.add(ids, salt, **fields)
        self.finish()
        return self.cached.get(number, 0)


def test_s50_a_key_is_a_sha256_chain_from_a_secret_seed() -> None:
    seed = b"s" * SEED_BYTES
    index = PrefixIndex(4, seed)
    request = fake_request(0, range(8))
    index.extend_keys(request, 2)
    first, second = request.block_hashes
    assert len(first) == len(second) == hashlib.sha256().digest_size
    tokens = struct.pack("<4I", 4, 5, 6, 7)
    assert second == hashlib.sha256(first + tokens).digest() == index.block_key(first, tokens)
    assert second != index.block_key(index.root_key("", None), tokens)
    again = fake_request(1, range(8))
    PrefixIndex(4, seed).extend_keys(again, 2)
    assert again.block_hashes == request.block_hashes


def test_s50_the_seed_is_another_one_in_every_engine(make_llm: Callable[..., LLM]) -> None:
    roots = {PrefixIndex(4).root_key("", None) for _ in range(20)}
    assert len(roots) == 20
    manager = KVCacheManager(8, 4)
    assert manager.index.root_key("", None) not in roots
    found: Any = make_llm()._engine.core.mechanism
    assert found.kv.index.root_key("", None) not in roots
    with pytest.raises(ValueError, match="16 bytes"):
        PrefixIndex(4, b"short")


class Alike(int):
    """A number whose hash is that of every other one."""

    def __hash__(self) -> int:
        return 7


def test_s50_python_s_own_hash_takes_no_part() -> None:
    """Token ids that Python hashes alike have different keys."""
    assert hash(Alike(4)) == hash(Alike(5)) and hash((Alike(4),)) == hash((Alike(5),))
    index = PrefixIndex(1, b"s" * SEED_BYTES)
    requests = [fake_request(number, [Alike(4 + number)]) for number in range(2)]
    for request in requests:
        assert isinstance(request.prompt_token_ids[0], Alike)
        index.extend_keys(request, 1)
    assert requests[0].block_hashes != requests[1].block_hashes


def test_s51_a_salt_keeps_prefixes_apart(make_llm: Callable[..., LLM]) -> None:
    run = Run(make_llm())
    prompt = list(range(4, 44))
    cached = [run.one(prompt, salt) for salt in ("a", "b", None, "a", "b", None, "c")]
    assert cached[:3] == [0, 0, 0] and cached[6] == 0
    assert all(count > 0 for count in cached[3:6])


def test_s51_a_salt_holds_after_preemption(make_llm: Callable[..., LLM]) -> None:
    """Two tenants with the same prompt in a pool that is too small for both: keys stay disjoint, whoever yields."""
    run = Run(make_llm(num_gpu_blocks_override=14, max_num_seqs=4))
    prompt = list(range(4, 24))
    mine = run.add(prompt, "tenant-a", max_tokens=20)
    theirs = run.add(prompt, "tenant-b", max_tokens=20)
    run.finish()
    assert run.llm.stats.num_preemptions_recompute + run.llm.stats.num_preemptions_swap > 0
    assert run.tokens[mine] == run.tokens[theirs] and len(run.tokens[mine]) == 20
    assert run.keys[mine] and run.keys[theirs] and not run.keys[mine] & run.keys[theirs]
    assert run.cached.get(mine, 0) == run.cached.get(theirs, 0) == 0
    assert run.one(prompt, "tenant-c") == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"adapter_key": "sha256:a"}, {"adapter_key": "sha256:b"}),
        ({"adapter_key": "sha256:a"}, {}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {}),
        ({"cache_salt": ""}, {}),
        ({"adapter_key": "a", "cache_salt": "b"}, {"adapter_key": "ab"}),
        ({"adapter_key": "a", "cache_salt": "b"}, {"adapter_key": "b", "cache_salt": "a"}),
        ({"adapter_key": "a\x01b"}, {"adapter_key": "a", "cache_salt": "b"}),
    ],
)
def test_s52_everything_that_changes_kv_is_in_the_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Adapter identity and salt, and no two combinations of them spell the same. (Data type and quantization are the
    engine's, of which there is one per index.)"""
    index = PrefixIndex(4, b"s" * SEED_BYTES)
    requests = [fake_request(number, range(8), **fields) for number, fields in enumerate((one, other, one))]
    for request in requests:
        index.extend_keys(request, 2)
    first, second, third = (request.block_hashes for request in requests)
    assert first == third and not set(first) & set(second)


HOSTILE: list[dict[str, Any]] = [
    {"logit_bias": {5: 100.0, 6: -100.0}, "repetition_penalty": 5.0},
    {"temperature": 2.0, "seed": 3, "top_k": 3, "min_p": 0.2},
    {"allowed_token_ids": [7], "presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"bad_words": ["the"], "min_tokens": 6, "stop_token_ids": [9]},
    {"logprobs": 5, "prompt_logprobs": 3},
    {"temperature": 1e6, "seed": 1, "top_p": 0.1},
    {"n": 3, "temperature": 1.0, "seed": 9, "ignore_eos": True},
]
VICTIMS: list[dict[str, Any]] = [
    {"logprobs": 5, "max_tokens": 10},
    {"logprobs": 2, "temperature": 0.8, "seed": 17, "top_p": 0.9, "max_tokens": 10},
    {"logprobs": 0, "repetition_penalty": 1.3, "max_tokens": 10, "ignore_eos": True},
]


@pytest.mark.parametrize("blocks", [200, 26], ids=["roomy", "preempting"])
def test_s53_neighbours_change_nothing(make_llm: Callable[..., LLM], blocks: int) -> None:
    """Tokens and log-probabilities of a request are the same bits alone and among hostile neighbours, whose parameters,
    prompts and times of arrival are drawn (with a fixed seed), with prefixes in common and blocks that run out."""
    llm = make_llm(num_gpu_blocks_override=blocks)
    shared = list(range(20, 36))
    prompts = [shared + [40 + number] * (3 + number) for number in range(len(VICTIMS))]
    alone = []
    for number, (prompt, fields) in enumerate(zip(prompts, VICTIMS, strict=True)):
        run = Run(llm)
        found = run.add(prompt, f"alone-{number}", **fields)
        run.finish()
        alone.append((run.tokens[found], run.logprobs[found]))
        assert len(run.tokens[found]) == 10 or not fields.get("ignore_eos")
    chance = random.Random(53)
    for turn in range(3):
        run = Run(llm)
        found_as: dict[int, int] = {}
        waiting: list[tuple[int | None, list[int], dict[str, Any]]] = list(zip(range(3), prompts, VICTIMS, strict=True))
        for fields in chance.sample(HOSTILE, 5):
            waiting.append((None, shared + [chance.randrange(4, 300) for _ in range(chance.randrange(1, 12))], fields))
        chance.shuffle(waiting)
        for victim, prompt, fields in waiting:
            added = run.add(prompt, f"turn-{turn}", **fields)
            if victim is not None:
                found_as[victim] = added
            for _ in range(chance.randrange(3)):
                run.step()
        run.finish()
        for number, expected in enumerate(alone):
            assert (run.tokens[found_as[number]], run.logprobs[found_as[number]]) == expected, (turn, number)
    llm.check_integrity()
    if blocks < 100:
        assert llm.stats.num_preemptions_recompute + llm.stats.num_preemptions_swap > 0


def test_s53_the_comparison_can_fail(make_llm: Callable[..., LLM]) -> None:
    """Another seed, and another prompt by one token, are seen."""
    run = Run(make_llm())
    prompt = list(range(20, 40))
    same, seed, token = (
        run.add(p, None, temperature=0.9, seed=s, logprobs=2, ignore_eos=True)
        for p, s in ((prompt, 1), (prompt, 2), ([*prompt[:-1], 41], 1))
    )
    run.finish()
    assert run.logprobs[same] != run.logprobs[seed] and run.logprobs[same] != run.logprobs[token]
