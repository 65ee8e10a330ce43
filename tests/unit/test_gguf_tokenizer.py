"""Tokenizers out of GGUF metadata, against independent builds of the same vocabulary."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.contracts.loader import ModelLoadError
from hotswap.core.text import Tokenizer
from hotswap.plugins.loaders.gguf import GGUFLoader
from hotswap.plugins.loaders.gguf_container import GGUFFile
from hotswap.plugins.loaders.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer_spec

DATA = Path(__file__).parent.parent / "data"
CORPUS: list[str] = [text for text, _ in json.loads((DATA / "smollm2_token_ids.json").read_text(encoding="utf-8"))]
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def write(path: Path, model: str, tokens: list[str], types: list[int], **keys: Any) -> Path:
    gguf: Any = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path) -> Tokenizer:
    spec = build_tokenizer_spec(GGUFFile(path))
    assert spec is not None
    return Tokenizer(spec)


def test_smollm2_ids(smollm2_path: Path) -> None:
    """Expected: the vocabulary under the rule of the model's own tokenizer.json (single digits, GPT-2 words)."""
    with GGUFLoader().open(smollm2_path) as checkpoint:
        spec = checkpoint.tokenizer_spec()
        assert spec is not None and checkpoint.chat_template is not None
    tokenizer = Tokenizer(spec)
    for text, ids in json.loads((DATA / "smollm2_token_ids.json").read_text(encoding="utf-8")):
        assert tokenizer.encode(text, allow_special=True) == ids, text
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos, len(tokenizer)) == (1, 2, False, 49152)


# Byte-level BPE: a vocabulary trained here, read back from GGUF, compared with the library under each model's own rule.

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def library_rules() -> dict[str, Any]:
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as pre

    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    qwen2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
    return {
        "gpt-2": gpt2,
        "smollm": pre.Sequence([pre.Digits(individual_digits=True), gpt2]),
        "llama-bpe": pre.Sequence([pre.Split(Regex(LLAMA3), "isolated"), byte_level]),
        "qwen2": pre.Sequence([pre.Split(Regex(qwen2), "isolated"), byte_level]),
    }


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_level_rules_equal_the_librarys(tmp_path: Path, name: str) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, trainers
    from tokenizers import pre_tokenizers as pre

    library = Library(models.BPE(ignore_merges=name == "llama-bpe"))
    library.pre_tokenizer = library_rules()[name]
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|end|>", "<tool>"],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(library.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(merge) for merge in model["merges"]]
    types = [CONTROL, USER, *[NORMAL] * (len(tokens) - 2)]
    path = write(
        tmp_path / "x.gguf",
        "gpt2",
        tokens,
        types,
        tokenizer_pre=name,
        token_merges=merges,
        eos_token_id=0,
        bos_token_id=0,
    )
    tokenizer = load(path)
    library.encode_special_tokens = True
    different = [
        text for text in CORPUS if tokenizer.encode(text, add_special_tokens=False) != library.encode(text).ids
    ]
    assert not different
    assert all(tokenizer.decode(tokenizer.encode(text)[tokenizer.add_bos :]) == text for text in CORPUS)
    assert tokenizer.special_ids == {0} and tokenizer.added_ids == {0, 1}
    assert tokenizer.add_bos == (name == "llama-bpe")


def test_every_rule_builds(tmp_path: Path) -> None:
    for name in PRE_TOKENIZERS:
        path = write(
            tmp_path / "x.gguf", "gpt2", ["a", "b", "ab"], [NORMAL] * 3, tokenizer_pre=name, token_merges=["a b"]
        )
        assert load(path).encode("ab", add_special_tokens=False) == [2]


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "gpt2", ["a"], [NORMAL], tokenizer_pre="from-the-future", token_merges=[])
    with pytest.raises(ModelLoadError, match=r"'from-the-future'.*known are.*qwen2"):
        load(path)
    with pytest.raises(ModelLoadError, match="'rwkv'"):
        load(write(tmp_path / "y.gguf", "rwkv", ["a"], [NORMAL]))


def test_no_vocabulary_means_no_tokenizer(tmp_path: Path) -> None:
    assert build_tokenizer_spec(GGUFFile(write(tmp_path / "x.gguf", "none", ["a"], [NORMAL]))) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"token_merges": ["a x"]}, "merge 'a x'"),
        ({"token_merges": [], "eos_token_id": 9}, "eos_token_id is 9"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "x.gguf", "gpt2", ["a", "b"], [NORMAL] * 2, tokenizer_pre="gpt-2", **keys)
    with pytest.raises(ModelLoadError, match=message):
        load(path)
    with pytest.raises(ModelLoadError, match="token_type"):
        load(write(tmp_path / "y.gguf", "gpt2", ["a", "b"], [NORMAL], tokenizer_pre="gpt-2"))
    with pytest.raises(ModelLoadError, match="scores"):
        load(write(tmp_path / "z.gguf", "llama", ["a", "b"], [NORMAL] * 2))


def test_repeated_padding_tokens_keep_their_ids(tmp_path: Path) -> None:
    tokens = ["a", "b", "[PAD]", "[PAD]", ""]
    path = write(tmp_path / "x.gguf", "gpt2", tokens, [NORMAL] * 5, tokenizer_pre="gpt-2", token_merges=[])
    assert load(path).vocab_size == 5


# SentencePiece: hand-made scores, against a slow, literal reading of its algorithm.

PIECES = ["\u2581", "t", "h", "e", "a", "\u2581t", "he", "th", "\u2581the", "\u2581a", "the", "ea", "\u2581\u2581"]


def sentencepiece_file(tmp_path: Path, **keys: Any) -> Path:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)]
    scores = [0.0] * 259 + [-float(n) for n in (12, 11, 10, 9, 8, 0, 2, 1, 3, 4, 5, 6, 7)]
    keys = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, **keys}
    return write(tmp_path / "x.gguf", "llama", tokens, types, token_scores=scores, **keys)


def merge_slowly(text: str) -> list[str]:
    scores = dict(zip(PIECES, (-float(n) for n in (12, 11, 10, 9, 8, 0, 2, 1, 3, 4, 5, 6, 7)), strict=True))
    parts = list(text.replace(" ", "\u2581"))
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(pairwise(parts))]
        found = [(score, i) for score, i in pairs if score is not None]
        if not found:
            return parts
        _, at = max(found)
        parts[-at : -at + 2] = [parts[-at] + parts[-at + 1]]


@pytest.mark.parametrize("text", ["the", "the the", "a  the", "theaht", " the a", "eathe", "tthhee   a"])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_merges_by_score(tmp_path: Path, text: str, prefix: bool) -> None:
    tokenizer = load(sentencepiece_file(tmp_path, add_space_prefix=prefix))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_string(i) for i in ids] == merge_slowly((" " if prefix else "") + text)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_falls_back_to_bytes_and_adds_bos(tmp_path: Path) -> None:
    tokenizer = load(sentencepiece_file(tmp_path))
    ids = tokenizer.encode("\u00e9 a")
    assert ids[0] == 1 and tokenizer.add_bos
    assert [tokenizer.token_bytes(i) for i in ids[1:4]] == [b" ", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "\u00e9 a"
    assert not load(sentencepiece_file(tmp_path, add_bos_token=False)).add_bos
