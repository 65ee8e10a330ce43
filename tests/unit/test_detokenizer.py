"""Streaming text: incremental decoding, stop strings, and both together."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.core.testing.tiny_models import save_byte_tokenizer
from hotswap.core.text import IncrementalDetokenizer, StopChecker, TextStream, Tokenizer, TokenizerSpec

FIRST_BYTE = 4  # of the byte tokenizer: the alphabet in its sorted order, see `byte_id`
IM_END = 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer(TokenizerSpec((folder / "tokenizer.json").read_bytes(), bos_id=0, eos_id=IM_END))


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte -> id of the token that is this byte alone."""
    found = {}
    for i in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(i)
        if len(data) == 1 and i not in tokenizer.special_ids:
            found[data[0]] = i
    assert len(found) == 256
    return found


def ids_of(data: bytes, byte_ids: dict[int, int]) -> list[int]:
    return [byte_ids[byte] for byte in data]


def test_random_bytes_never_raise_and_agree_with_whole_decoding(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    rng = random.Random(5)
    pools = [[0x80, 0xBF, 0xF0, 0x9F, 0x98, 0x80, 0xE2, 0xC3, 0x41], list(range(256)), [0xF0, 0x41], [0xED, 0xA0, 0x80]]
    for n in range(1000):
        data = bytes(rng.choice(pools[n % len(pools)]) for _ in range(rng.randrange(1, 24)))
        ids = ids_of(data, byte_ids)
        stream = IncrementalDetokenizer(tokenizer)
        text = ""
        for count, token_id in enumerate(ids, start=1):
            text += stream.feed([token_id])
            settled = data[:count].decode("utf-8", errors="replace")
            assert settled.startswith(text)
            assert len(stream._decoder.getstate()[0]) <= 3
        text += stream.finish()
        assert text == tokenizer.decode(ids) == data.decode("utf-8", errors="replace")


@given(st.text(max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_replacement_character_for_a_character_that_completes(
    tokenizer: Tokenizer, byte_ids: dict[int, int], text: str, rng: random.Random
) -> None:
    text = text.replace("\ufffd", "")
    ids = ids_of(text.encode(), byte_ids)
    stream = IncrementalDetokenizer(tokenizer)
    out = ""
    while ids:
        size = rng.randrange(1, 6)
        run, ids = ids[:size], ids[size:]
        delta = stream.feed(run)
        assert "\ufffd" not in delta
        out += delta
    assert out + stream.finish() == text


@pytest.mark.parametrize("text", ["\u00e9\U0001f600", "a\u4e2db", "\U0001f468\u200d\U0001f469"])
def test_logprob_pieces_are_exact(tokenizer: Tokenizer, byte_ids: dict[int, int], text: str) -> None:
    ids = ids_of(text.encode(), byte_ids)
    stream = IncrementalDetokenizer(tokenizer)
    other = byte_ids[ord("z")]
    pieces = []
    for token_id in ids:
        alternative = stream.peek_piece(other)
        assert alternative.bytes == b"z" and alternative.text.endswith("z")
        assert stream.peek_piece(token_id) == stream.peek_piece(token_id)
        piece = stream.feed_piece(token_id)
        assert piece.bytes == tokenizer.token_bytes(token_id)
        pieces.append(piece)
    assert b"".join(piece.bytes for piece in pieces) == text.encode()
    assert "".join(piece.text for piece in pieces) == text


def test_alternatives_are_read_after_the_sampled_prefix(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    first, second = "\u00e9".encode()
    stream = IncrementalDetokenizer(tokenizer)
    stream.feed_piece(byte_ids[first])
    assert stream.peek_piece(byte_ids[second]).text == "\u00e9"
    assert stream.peek_piece(byte_ids[second ^ 1]).text == "\u00e8"


def test_special_tokens_shown_or_hidden(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    ids = [byte_ids[ord("a")], IM_END, byte_ids[ord("b")]]
    assert IncrementalDetokenizer(tokenizer).feed(ids) == "ab"
    assert IncrementalDetokenizer(tokenizer, skip_special_tokens=False).feed(ids) == "a<|im_end|>b"


def sentencepiece() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "\u2581\u2581", "\u2581\u2581\u2581\u2581"]
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
        "model": {"type": "BPE", "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": []},
    }
    return Tokenizer(TokenizerSpec(json.dumps(document).encode()))


def test_spaces_survive_piecewise_decoding() -> None:
    tokenizer = sentencepiece()
    a, b, word, two, four = (tokenizer.token_id(t) or -1 for t in ("a", "b", "\u2581a", "\u2581" * 2, "\u2581" * 4))
    ids = [a, four, four, four, four, tokenizer.token_id("\u2581") or -1, b]
    stream = IncrementalDetokenizer(tokenizer)
    assert "".join(stream.feed([i]) for i in ids) == "a" + 17 * " " + "b"
    assert IncrementalDetokenizer(tokenizer).feed([word, two]) == " a  "  # after a prompt the space belongs to the text
    fresh = IncrementalDetokenizer(tokenizer, continuation=False)
    assert fresh.feed([word]) + fresh.feed([word]) == "a a" == tokenizer.decode([word, word])


def test_spaces_between_special_tokens_where_words_are_joined_by_spaces() -> None:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "<x>", **special}, {"id": 2, "content": "<y>", **special}],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "<x>": 1, "<y>": 2}, "unk_token": "a"},
    }
    tokenizer = Tokenizer(TokenizerSpec(json.dumps(document).encode()))
    for spaces, expected in ((True, " a <x> <y> a"), (False, " a <x><y> a")):
        stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert stream.feed([0, 1, 2, 0]) == expected


# Stop strings


def run(checker: StopChecker, text: str, sizes: list[int]) -> tuple[str, str | None, int]:
    """Feeds one character a token, in runs of the given sizes; text, stop and number of tokens delivered."""
    out, count, position = "", 0, 0
    for size in sizes:
        result = checker.push(list(text[position : position + size]))
        position += size
        out += result.text
        count += result.num_tokens
        if result.stop is not None:
            return out, result.stop, count
    return out + checker.flush(), None, count


def reference(text: str, stops: list[str], include: bool, min_tokens: int) -> tuple[str, str | None, int]:
    for end in range(min_tokens + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[:end] if include else text[: end - len(stop)], stop, end
    return text, None, len(text)


@given(
    st.text(alphabet="abc", max_size=24),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    st.booleans(),
    st.integers(0, 6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_stops_do_not_depend_on_how_the_stream_is_cut(
    text: str, stops: list[str], include: bool, min_tokens: int, rng: random.Random
) -> None:
    sizes: list[int] = []
    while sum(sizes) < len(text):
        sizes.append(rng.randrange(1, 6))
    checker = StopChecker(stops, include_stop_str=include, min_tokens=min_tokens)
    assert run(checker, text, sizes) == reference(text, stops, include, min_tokens)


def test_no_delta_holds_part_of_a_stop_string_that_completes() -> None:
    text = "one\ntwo\n\nUs three\n\nUx\n\nUser: no"
    checker = StopChecker(["\n\nUser"])
    sent = ""
    for char in text:
        result = checker.push([char])
        sent += result.text
        assert text.startswith(sent) and len(sent) <= text.index("\n\nUser")
        if result.stop:
            break
    assert sent == "one\ntwo\n\nUs three\n\nUx"


def test_false_starts_are_released_once() -> None:
    checker = StopChecker(["abab!"])
    parts = [checker.push([char]).text for char in "ababab?"]
    assert "".join(parts) == "ababab?"
    assert checker.flush() == ""


@pytest.mark.parametrize(("include", "expected"), [(False, "xy"), (True, "xySTOP")])
def test_stop_in_the_middle_of_an_accepted_run(include: bool, expected: str) -> None:
    result = StopChecker(["END", "STOP"], include_stop_str=include).push(["x", "yST", "OP", " more", "END"])
    assert (result.text, result.stop, result.num_tokens) == (expected, "STOP", 3)


def test_the_stop_that_ends_first_wins() -> None:
    assert StopChecker(["cd", "b"]).push(["abcd"]).text == "a"
    assert StopChecker(["b", "cd"]).push(["abcd"]).stop == "b"
    both = StopChecker(["bc", "abc"]).push(["xabc"])
    assert (both.text, both.stop) == ("x", "abc")


def test_stop_strings_of_one_letter_runs() -> None:
    stops = ["a" * 255 + "b", *("a" * n + "c" for n in range(240, 255))]
    checker = StopChecker(stops)
    text = "a" * 3000
    assert checker.push([text]).text == text[255:]
    assert checker.push(["a"]).text == "a"
    assert checker.push(["b"]).stop == stops[0]


# Both together


def stream_text(stream: TextStream, ids: list[int], sizes: list[int]) -> tuple[str, int]:
    text, count = "", 0
    while ids:
        size = sizes.pop(0) if sizes else len(ids)
        part, ids = ids[:size], ids[size:]
        result = stream.push(part, finished=not ids)
        text += result.text
        count += result.num_tokens
        if result.stop:
            break
    return text, count


def test_stream_equals_non_stream_with_stops_and_multibyte(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    ids = ids_of("h\u00e9llo \U0001f600 w\u00f6rld \u2014 stop here".encode(), byte_ids)
    whole = stream_text(TextStream(tokenizer, stops=["\u2014 st"]), ids, [])
    assert whole[0] == "h\u00e9llo \U0001f600 w\u00f6rld "
    for size in range(1, 9):
        assert stream_text(TextStream(tokenizer, stops=["\u2014 st"]), list(ids), [size] * 99) == whole


def test_truncated_character_at_the_end(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    ids = ids_of(b"ok\xf0\x9f", byte_ids)
    for stops in ([], ["zz"]):
        stream = TextStream(tokenizer, stops=stops)
        assert "".join(stream.push([i], finished=i == ids[-1]).text for i in ids) == "ok\ufffd"


@pytest.mark.parametrize(("include", "shown"), [(False, "ab"), (True, "ab<|im_end|>")])
@pytest.mark.parametrize("stops", [[], ["zz"]])
def test_stop_token_text_appears_once_or_not_at_all(
    tokenizer: Tokenizer, byte_ids: dict[int, int], include: bool, shown: str, stops: list[str]
) -> None:
    stream = TextStream(tokenizer, stops=stops, include_stop_str=include, skip_special_tokens=False)
    first = stream.push([byte_ids[ord("a")]])
    last = stream.push([byte_ids[ord("b")], IM_END], finished=True, ends_with_stop_token=True)
    assert first.text + last.text == shown
    assert first.num_tokens + last.num_tokens == 3


def test_held_text_is_released_at_the_end(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    stream = TextStream(tokenizer, stops=["abc"])
    assert stream.push(ids_of(b"xab", byte_ids)).text == "x"
    assert stream.push([IM_END], finished=True, ends_with_stop_token=True).text == "ab"


def test_cost_does_not_grow_with_the_length(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    """State is bounded: what a detokenizer and a checker keep after 20,000 tokens is what they keep after 20."""
    stream = IncrementalDetokenizer(tokenizer)
    checker = StopChecker(["abcd"])
    for _ in range(20_000):
        checker.push([stream.feed([byte_ids[ord("a")]])])
    assert len(checker._held) == 1
    assert stream._decoder.getstate()[0] == b""
