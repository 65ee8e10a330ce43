"""The exact bytes of each token, by the kind of the tokenizer's decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

SPACE_MARK = "\u2581"  # how SentencePiece spells a space


def byte_level_alphabet() -> dict[int, str]:
    """Byte -> the character that byte-level BPE spells it with (printable Latin-1 as itself, the rest from U+0100
    on).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    alphabet.update({byte: chr(0x100 + n) for n, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = {ord(char): byte for byte, char in byte_level_alphabet().items()}


class TokenBytes(dict[int, bytes]):
    """Token id -> the bytes it adds after another token. Filled on demand: a lookup is a dict access from then on.

    Three kinds of decoder are understood exactly: byte-level; SentencePiece with byte fallback; SentencePiece's space
    mark alone. For any other (WordPiece, none, ...) a token's bytes are what the library's own decoder adds after a
    token, which is exact for decoders that look at one token at a time, as all known ones do.
    """

    def __init__(self, backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None, added: Mapping[int, str]) -> None:
        super().__init__()
        self._backend = backend
        self._added = dict(added)
        steps = _flatten(decoder)
        kinds = {step["type"] for step in steps}
        self._kind = "probe"
        self._fallback = "ByteFallback" in kinds
        self._strips_first_space = False
        if kinds == {"ByteLevel"}:
            self._kind = "byte-level"
        elif steps and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and _marks_spaces(steps):
            self._kind = "space-mark"
            self._strips_first_space = any(
                (step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) == 1)
                or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
                for step in steps
            )

    def __missing__(self, token_id: int) -> bytes:
        value = self._compute(token_id)
        self[token_id] = value
        return value

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._kind == "probe":
            return self._probe(token_id)
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", errors="replace")
        if self._kind == "byte-level":
            try:
                return bytes([_BYTE_OF_CHAR[ord(char)] for char in token])
            except KeyError:
                return token.encode("utf-8", errors="replace")
        if self._fallback and (byte := _byte_token(token)) is not None:
            return bytes([byte])
        return token.replace(SPACE_MARK, " ").encode("utf-8", errors="replace")

    def _probe(self, token_id: int) -> bytes:
        alone: str = self._backend.decode([token_id], skip_special_tokens=False)
        twice: str = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return (twice[len(alone) :] if twice.startswith(alone) else alone).encode("utf-8", errors="replace")

    def at_start(self, ids: Sequence[int], data: bytes) -> bytes:
        """`data`, the bytes of `ids`, when they begin a text."""
        if self._kind == "probe":
            if not ids:
                return data
            alone: str = self._backend.decode([ids[0]], skip_special_tokens=False)
            return alone.encode("utf-8", errors="replace") + data[len(self[ids[0]]) :]
        if self._strips_first_space and data.startswith(b" ") and ids[0] not in self._added:
            return data[1:]
        return data


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _marks_spaces(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether the steps turn the space mark, and nothing else, into a space."""
    replaced = [step for step in steps if step["type"] == "Replace"]
    metaspace = [step for step in steps if step["type"] == "Metaspace"]
    fits = all(step["pattern"] == {"String": SPACE_MARK} and step["content"] == " " for step in replaced)
    return (
        fits
        and all(step.get("replacement", SPACE_MARK) == SPACE_MARK for step in metaspace)
        and bool(replaced or metaspace)
    )


def _byte_token(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None
