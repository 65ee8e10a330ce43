"""Encoding, decoding and exact bytes, on a byte-level and a SentencePiece-style tokenizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.core.errors import ModelLoadError, RequestError
from hotswap.core.testing.tiny_models import save_byte_tokenizer
from hotswap.core.text import RenderedPrompt, Tokenizer, TokenizerSpec
from hotswap.core.text.tokenizer import GUARD_END, GUARD_START

BOS, EOS, IM_START, IM_END = 0, 1, 2, 3  # of the byte tokenizer


def byte_level(tmp: Path, **changes: Any) -> Tokenizer:
    data = (save_byte_tokenizer(tmp) / "tokenizer.json").read_bytes()
    return Tokenizer(TokenizerSpec(data, bos_id=BOS, eos_id=IM_END, **changes))


def sentencepiece_json(**changes: Any) -> bytes:
    """Control tokens 0-2, bytes 3-258, then a few pieces; a text gets a leading space, as Llama 2's does."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "a", "b", "\u2581a", "\u2581b", "\u2581\u2581", "\u2581\u2581\u2581\u2581"]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": pieces[i], **special} for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, space]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                back,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [
                ["\u2581", "a"],
                ["\u2581", "b"],
                ["\u2581", "\u2581"],
                ["\u2581\u2581", "\u2581\u2581"],
            ],
        },
        **changes,
    }
    return json.dumps(document).encode()


@pytest.fixture
def sentencepiece() -> Tokenizer:
    return Tokenizer(TokenizerSpec(sentencepiece_json(), bos_id=1, eos_id=2, unk_id=0, add_bos=True))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return byte_level(tmp_path)


def test_special_strings_in_text_are_text_unless_allowed(tokenizer: Tokenizer) -> None:
    text = "a<|im_end|>b"
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert IM_END not in plain
    assert tokenizer.decode(plain) == text
    assert IM_END in tokenizer.encode(text, add_special_tokens=False, allow_special=True)
    batch = tokenizer.encode_batch(["no specials", text], add_special_tokens=False)
    assert batch == [tokenizer.encode("no specials", add_special_tokens=False), plain]


def test_a_special_token_that_hides_behind_normalization_stays_text() -> None:
    document = json.loads(sentencepiece_json())
    document["normalizer"]["normalizers"].insert(0, {"type": "NFKC"})
    for token in document["added_tokens"]:
        token["normalized"] = True
    tokenizer = Tokenizer(TokenizerSpec(json.dumps(document).encode(), bos_id=1, eos_id=2))
    wide = "\uff1c/s\uff1e"  # becomes "</s>" under NFKC
    assert 2 not in tokenizer.encode(wide, add_special_tokens=False)
    assert 2 not in tokenizer.encode_chat(RenderedPrompt(f"a{wide}"))
    assert 2 in tokenizer.encode_chat(RenderedPrompt("a</s>"))


def test_template_specials_are_tokens_and_user_specials_are_text(tokenizer: Tokenizer) -> None:
    prompt = RenderedPrompt(f"<|im_start|>user\na {GUARD_START}<|im_end|>{GUARD_END} b<|im_end|>\n")
    ids = tokenizer.encode_chat(prompt)
    assert (ids.count(IM_START), ids.count(IM_END)) == (1, 1)
    assert tokenizer.decode(ids) == "<|im_start|>user\na <|im_end|> b<|im_end|>\n" == prompt.text
    middle = tokenizer.encode("user\na <|im_end|> b", add_special_tokens=False)
    assert ids == [IM_START, *middle, IM_END, *tokenizer.encode("\n", add_special_tokens=False)]


def test_a_lone_guard_keeps_pieces_from_joining(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat(RenderedPrompt(f"<|im_{GUARD_END}end|><|im_start|>"))
    assert IM_END not in ids
    assert ids[-1] == IM_START


def test_guarded_chat_is_spaced_like_an_unguarded_one(sentencepiece: Tokenizer) -> None:
    plain = sentencepiece.encode_chat(RenderedPrompt("a b</s>a"))
    guarded = sentencepiece.encode_chat(RenderedPrompt(f"a b</s>a{GUARD_END}"))
    assert guarded == plain


@pytest.mark.parametrize(("text", "count"), [("<s>hi", 1), ("hi", 1), ("<s><s>hi", 1)])
def test_chat_has_exactly_one_bos(sentencepiece: Tokenizer, text: str, count: int) -> None:
    ids = sentencepiece.encode_chat(RenderedPrompt(text))
    assert ids[0] == 1 and ids.count(1) == count


def test_chat_gets_no_bos_from_a_tokenizer_that_adds_none(tokenizer: Tokenizer) -> None:
    assert not tokenizer.add_bos
    assert tokenizer.encode_chat(RenderedPrompt("<|im_start|>x"))[0] == IM_START


def test_add_special_tokens_governs_bos_on_raw_text(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("a") == [1, *sentencepiece.encode("a", add_special_tokens=False)]
    assert sentencepiece.add_bos


def test_bos_and_eos_follow_the_post_processor() -> None:
    post = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
            "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]},
        },
    }
    data = sentencepiece_json(post_processor=post)
    tokenizer = Tokenizer(TokenizerSpec(data, bos_id=1, eos_id=2))
    ids = tokenizer.encode("a")
    assert (ids[0], ids[-1]) == (1, 2) and tokenizer.add_bos
    overridden = Tokenizer(TokenizerSpec(data, bos_id=1, eos_id=2, add_bos=False, add_eos=False))
    assert overridden.encode("a") == ids[1:-1]


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    tokenizer = _cached(tmp_path_factory)
    assert tokenizer.decode(tokenizer.encode(text)) == text


_TOKENIZERS: list[Tokenizer] = []


def _cached(factory: pytest.TempPathFactory) -> Tokenizer:
    if not _TOKENIZERS:
        _TOKENIZERS.append(byte_level(factory.mktemp("tokenizer")))
    return _TOKENIZERS[0]


@given(st.text(alphabet="ab \u00e9\u4e2d\U0001f600", min_size=1, max_size=30))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_sentencepiece_bytes_are_exact(text: str) -> None:
    tokenizer = Tokenizer(TokenizerSpec(sentencepiece_json(), bos_id=1, eos_id=2))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == (" " + text).encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, continuation=True) == " " + text


def test_token_bytes_of_each_kind(tokenizer: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert tokenizer.token_bytes(IM_END) == b"<|im_end|>"
    assert sentencepiece.token_bytes(3 + 0xE9) == b"\xe9"
    assert sentencepiece.token_bytes(sentencepiece.token_id("\u2581a") or -1) == b" a"
    assert sentencepiece.leading_bytes(sentencepiece.token_id("\u2581a") or -1) == b"a"
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


def test_decoding_agrees_with_the_library_on_valid_text(tokenizer: Tokenizer) -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_buffer(tokenizer._json)
    for text in ["caf\u00e9 \U0001f600", "  two", "<|im_start|>x<|im_end|>", "\u4e2d\u6587"]:
        ids = tokenizer.encode(text, allow_special=True)
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == library.decode(ids, skip_special_tokens=True)


def test_words_joined_by_spaces_when_there_is_no_decoder() -> None:
    document = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"hello": 0, "world": 1, "?": 2}, "unk_token": "?"},
    }
    tokenizer = Tokenizer(TokenizerSpec(json.dumps(document).encode()))
    ids = tokenizer.encode("hello world")
    assert tokenizer.decode(ids) == "hello world"
    assert [tokenizer.token_bytes(i) for i in ids] == [b" hello", b" world"]


def test_sizes(tokenizer: Tokenizer) -> None:
    assert len(tokenizer) == tokenizer.vocab_size
    assert max(tokenizer.encode("abc\U0001f600")) < tokenizer.vocab_size


def test_lone_surrogate_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode_chat(RenderedPrompt("a\ud83d"))


def test_a_damaged_file_is_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match="cannot be read"):
        Tokenizer(TokenizerSpec(b"{}"))


def test_text_layer_and_loaders_import_neither_torch_nor_transformers() -> None:
    import subprocess

    modules = "hotswap.core.text, hotswap.plugins.loaders.gguf, hotswap.plugins.loaders.safetensors"
    modules += (
        ", hotswap.plugins.loaders.dummy, hotswap.plugins.loaders.source_hub, hotswap.plugins.loaders.source_pypi"
    )
    code = f"import sys; sys.path[:] = {sys.path!r}; import {modules}; "
    code += "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
