"""Builds a `tokenizer.json` from the vocabulary in a GGUF file, without transformers.

Two families: byte-level BPE (`tokenizer.ggml.model` "gpt2"), whose word-splitting rule `tokenizer.ggml.pre` names, and
SentencePiece BPE ("llama"), whose merges follow from the scores. An unknown name is an error: a wrong splitting rule
would not fail, it would make the model quietly worse.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from hotswap.core.contracts.loader import ModelLoadError, TokenizerSpec

from .gguf_container import GGUFFile

# Token types of the file.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_SPACE = "\u2581"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"


def _cl100k(digits: str, letters: str = r"\p{L}") -> str:
    """The rule that GPT-4's tokenizer started: contractions, words with one leading sign, digits, signs, spaces."""
    signs = rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}|{signs}|{_TAIL}"


def _cased(digits: str, suffix: str = "") -> str:
    """The rule that GPT-4o's tokenizer started: words also split where lower case meets upper case."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _ASCII_SIGNS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
)
_LLAMA3 = (_cl100k(r"\p{N}{1,3}"),)
_QWEN2 = (_cl100k(_DIGIT),)
_GPT4O = (_cased(r"\p{N}{1,3}", _CONTRACTIONS + "?"),)
_STARCODER = (_DIGIT, _GPT2)

# Rules are applied one after another, each to the pieces that the one before left.
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "a.x-4.0", "mellum", "trillion"), (_GPT2,)
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _STARCODER),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "dbrx", "smaug-bpe", "glm4"), _LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2", "solar-open"), _QWEN2),
    "qwen35": (_cl100k(_DIGIT, r"\p{L}\p{M}"),),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK_V3),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", _DIGIT),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": (_cased(_DIGIT),),
}
# Vocabularies that hold whole words: a piece that is a token is taken as it is, before any merge.
_IGNORE_MERGES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"})
_ADD_BOS = _IGNORE_MERGES


def build_tokenizer_spec(file: GGUFFile) -> TokenizerSpec | None:
    """The tokenizer of a GGUF file; None when it has no vocabulary.

    Raises ModelLoadError for a kind that is not known.
    """
    model = file.get("tokenizer.ggml.model", str)
    if model is None or model == "none":
        return None
    tokens = _strings(file, "tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.tokens is missing")
    tokens = _unique(tokens)
    types = _types(file, len(tokens))
    if model == "gpt2":
        document = _byte_level(file, tokens, types)
        add_bos = (file.get("tokenizer.ggml.pre", str) or "default") in _ADD_BOS
    elif model == "llama":
        document = _sentencepiece(file, tokens, types)
        add_bos = True
    else:
        raise ModelLoadError(
            f"{file.path}: the tokenizer model {model!r} (tokenizer.ggml.model) is not supported; gpt2 and llama are. "
            "Give another folder's tokenizer with --tokenizer"
        )
    ids = {name: _token_id(file, name, len(tokens)) for name in ("bos", "eos", "unknown", "padding")}
    document["added_tokens"] = _added_tokens(tokens, types, ids["unknown"])
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return TokenizerSpec(
        json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace"),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unk_id=ids["unknown"],
        pad_id=ids["padding"],
        add_bos=_flag(file, "tokenizer.ggml.add_bos_token", add_bos),
        add_eos=_flag(file, "tokenizer.ggml.add_eos_token", False),
        special_tokens={named[name]: tokens[i] for name, i in ids.items() if i is not None},
    )


def _document(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    base = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None}
    return {**base, "post_processor": None, "decoder": None, **parts, "model": model}


def _bpe(tokens: Sequence[str], merges: list[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    base = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return {**base, "unk_token": None, "fuse_unk": False, **settings, "vocab": vocabulary, "merges": merges}


def _byte_level(file: GGUFFile, tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    pre = file.get("tokenizer.ggml.pre", str) or "default"  # the format's rule for files without the key
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelLoadError(
            f"{file.path}: the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not known; known are {known}. "
            "Give another folder's tokenizer with --tokenizer"
        )
    known_tokens = set(tokens)
    merges: list[tuple[str, str]] = []
    for line in _strings(file, "tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if left not in known_tokens or right not in known_tokens or left + right not in known_tokens:
            raise ModelLoadError(f"{file.path}: the merge {line!r} names a token that the vocabulary does not have")
        merges.append((left, right))
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in PRE_TOKENIZERS[pre]
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return _document(
        _bpe(tokens, merges, byte_fallback=False, ignore_merges=pre in _IGNORE_MERGES),
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    )


def _sentencepiece(file: GGUFFile, tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise ModelLoadError(
            f"{file.path}: tokenizer.ggml.scores must hold one score for each of the {len(tokens)} tokens"
        )
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    has_bytes = sum(kind == BYTE for kind in types) == 256
    prefix = _flag(file, "tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    steps: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _document(
        _bpe(
            tokens,
            merges_from_scores(tokens, scores.tolist(), types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=has_bytes,
            ignore_merges=False,
        ),
        normalizer={"type": "Sequence", "normalizers": [*prepend, replace]},
        decoder={"type": "Sequence", "decoders": steps},
    )


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE: every way to split a token into two tokens, best score first.

    SentencePiece merges the neighbouring pair whose union has the highest score; ranked so, BPE does the same.
    """
    rank = {token: i for i, token in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED, UNUSED)}
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, i in rank.items():
        for cut in range(1, len(token)):
            left = rank.get(token[:cut])
            if left is not None:
                right = rank.get(token[cut:])
                if right is not None:
                    found.append((-scores[i], i, left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _added_tokens(tokens: Sequence[str], types: Sequence[int], unknown: int | None) -> list[dict[str, Any]]:
    """Control tokens are special; user-defined ones are matched in any text but are not special."""
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    out: list[dict[str, Any]] = []
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) or i == unknown:
            out.append({"id": i, "content": token, **entry, "special": kind != USER_DEFINED})
    return out


def _unique(tokens: list[str]) -> list[str]:
    """Padding rows repeat a spelling in some files; the later ones get a spelling of their own, as ids must stay."""
    seen: set[str] = set()
    out: list[str] = []
    for i, token in enumerate(tokens):
        if not token or token in seen:
            token = f"\ufdd6{i}"
        seen.add(token)
        out.append(token)
    return out


def _strings(file: GGUFFile, key: str) -> list[str]:
    value = file.metadata.get(key, [])
    if not isinstance(value, list) or (value and not isinstance(value[0], str)):
        raise ModelLoadError(f"{file.path}: {key} must be an array of strings")
    return [item for item in value if isinstance(item, str)]


def _types(file: GGUFFile, count: int) -> list[int]:
    value = file.metadata.get("tokenizer.ggml.token_type")
    if value is None:
        return [NORMAL] * count
    if not isinstance(value, np.ndarray) or len(value) != count:
        raise ModelLoadError(
            f"{file.path}: tokenizer.ggml.token_type must hold one integer for each of the {count} tokens"
        )
    return [int(kind) for kind in value.tolist()]


def _token_id(file: GGUFFile, name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.get(key, int)
    if value is None or value == 0xFFFFFFFF:  # how writers spell "none"
        return None
    if not 0 <= value < count:
        raise ModelLoadError(f"{file.path}: {key} is {value}, but there are {count} tokens")
    return value


def _flag(file: GGUFFile, key: str, default: bool) -> bool:
    value = file.get(key, bool)
    return default if value is None else value
