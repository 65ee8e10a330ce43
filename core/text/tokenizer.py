"""The tokenizer: text to ids, ids to exact bytes. Wraps the `tokenizers` library; needs neither torch nor transformers.

Three rules are kept here, whatever the checkpoint:
- text from a user never becomes a control token unless the caller says so (`allow_special`);
- a chat prompt starts with exactly one BOS when the tokenizer adds one, whether or not the template printed it;
- decoding is defined by bytes: a text is the concatenation of its tokens' bytes, read as UTF-8, an invalid sequence
  giving one U+FFFD for each maximal ill-formed part. Streaming and whole decoding therefore agree.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import tokenizers

from ..contracts.loader import TokenizerSpec
from ..errors import ModelLoadError, RequestError
from .token_bytes import TokenBytes

__all__ = ["GUARD_END", "GUARD_START", "RenderedPrompt", "Tokenizer", "TokenizerSpec"]

# Noncharacters: no text has a use for them. The renderer takes them out of what users send before it adds its own.
GUARD_START = "\ufdd0"
GUARD_END = "\ufdd1"


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What a chat template made of a conversation.

    guarded: the prompt with user-written special-token strings between GUARD_START and GUARD_END. A guard without its
    partner keeps two strings of different origin from joining into a special token.
    """

    guarded: str

    @property
    def text(self) -> str:
        """The prompt as the model's author meant it to read."""
        return self.guarded.replace(GUARD_START, "").replace(GUARD_END, "")


class Tokenizer:
    """Thread-safe; encoding releases the GIL.

    Build one a process: it holds the vocabulary twice once a prompt needs it.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        """Raises ModelLoadError when `spec.tokenizer_json` cannot be read."""
        self._json = spec.tokenizer_json
        self._named = tuple(spec.special_tokens.values())
        self._parsing = self._build()
        self._lock = threading.Lock()  # guards the lazy members
        self._plain_backend: tokenizers.Tokenizer | None = None
        self._twin: _GuardedTwin | None = None
        added = self._parsing.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.added_ids: frozenset[int] = frozenset(added)
        self.special_tokens: dict[str, int] = {added[i].content: i for i in sorted(self.special_ids)}
        self.bos_id, self.eos_id, self.unk_id, self.pad_id = spec.bos_id, spec.eos_id, spec.unk_id, spec.pad_id
        self.named_special_tokens: dict[str, str] = dict(spec.special_tokens)
        decoder = self._parsing.decoder
        self._bytes = TokenBytes(
            self._parsing,
            None if decoder is None else json.loads(decoder.__getstate__()),
            {i: token.content for i, token in added.items()},
        )
        self._prefix, self._suffix = self._affixes(spec)
        self._special_re = re.compile(special_pattern(list(self.special_tokens)))
        # A special token that is matched after normalisation can hide from a search of the raw text.
        self._specials_are_literal = not any(added[i].normalized for i in self.special_ids)

    def _build(self) -> tokenizers.Tokenizer:
        try:
            backend = tokenizers.Tokenizer.from_buffer(self._json)
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise ModelLoadError(f"tokenizer.json cannot be read: {error}") from error
        backend.no_padding()
        backend.no_truncation()
        known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        # A named one (EOS, ...) is special even where the file holds it as an ordinary word.
        backend.add_special_tokens(
            [
                tokenizers.AddedToken(token, special=True, normalized=False)
                for token in dict.fromkeys(self._named)
                if token not in known and backend.token_to_id(token) is not None
            ]
        )
        return backend

    def _build_plain(self) -> tokenizers.Tokenizer:
        plain = self._build()
        plain.encode_special_tokens = True
        return plain

    def _backend_for(self, text: str, allow_special: bool) -> tokenizers.Tokenizer:
        """The backend that reads `text` right.

        The plain one is built when a text first holds a special token's string.
        """
        if allow_special or (self._specials_are_literal and self._special_re.search(text) is None):
            return self._parsing
        with self._lock:
            if self._plain_backend is None:
                self._plain_backend = self._build_plain()
            return self._plain_backend

    def _affixes(self, spec: TokenizerSpec) -> tuple[list[int], list[int]]:
        """What encoding with special tokens puts around a text: as in tokenizer.json, unless the spec overrides it."""
        probe = self._parsing.encode("a", add_special_tokens=True)
        mask = probe.special_tokens_mask
        first = next((i for i, special in enumerate(mask) if not special), len(mask))
        last = next((i for i in range(len(mask), 0, -1) if not mask[i - 1]), first)
        if first == len(mask) and first and probe.ids[-1] == spec.eos_id:  # no token for "a": all of it is affixes
            first = last = len(mask) - 1
        prefix, suffix = list(probe.ids[:first]), list(probe.ids[last:])
        if spec.add_bos is not None:
            prefix = _with_edge(prefix, spec.bos_id, wanted=spec.add_bos, at_start=True)
        if spec.add_eos is not None:
            suffix = _with_edge(suffix, spec.eos_id, wanted=spec.add_eos, at_start=False)
        return prefix, suffix

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id: every id of this tokenizer is below it."""
        return max(self._parsing.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def __len__(self) -> int:
        """The number of tokens, added ones included."""
        return self._parsing.get_vocab_size(with_added_tokens=True)

    @property
    def add_bos(self) -> bool:
        """Whether encoding with special tokens starts with BOS."""
        return self.bos_id is not None and self._prefix[:1] == [self.bos_id]

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]:
        """Token ids of `text`.

        add_special_tokens: put BOS (and what else the tokenizer adds) around it.
        allow_special: read special-token strings in `text` as the tokens; otherwise they are plain text.
        Raises RequestError for a text that is not valid Unicode (a lone surrogate).
        """
        _check_unicode(text)
        ids = _encode(self._backend_for(text, allow_special), text)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        for text in texts:
            _check_unicode(text)
        backend = self._parsing
        for text in texts:
            backend = self._backend_for(text, allow_special)
            if backend is not self._parsing:  # the plain backend is right for every text
                break
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        if add_special_tokens:
            return [[*self._prefix, *encoding.ids, *self._suffix] for encoding in encodings]
        return [encoding.ids for encoding in encodings]

    def encode_chat(self, prompt: RenderedPrompt) -> list[int]:
        """Token ids of a rendered chat: the template's special tokens are tokens, those in users' strings are text.

        When the tokenizer adds BOS, the result starts with exactly one, printed by the template or not.
        """
        text = prompt.guarded
        _check_unicode(text)
        if GUARD_START in text or GUARD_END in text or not self._specials_are_literal:
            ids = self._guarded_twin().encode(text)
        else:
            ids = _encode(self._parsing, text)
        if self.add_bos:
            bos = self._prefix[0]
            count = 0
            while count < len(ids) and ids[count] == bos:
                count += 1
            ids = [bos, *ids[count:]]
        return ids

    def _guarded_twin(self) -> _GuardedTwin:
        with self._lock:
            if self._twin is None:
                self._twin = _GuardedTwin(self._build_plain())
            return self._twin

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, continuation: bool = False) -> str:
        """The text of `ids`.

        continuation: `ids` go on after other tokens, so the space that the tokenizer's first word carries is kept.
        Ids that no token has (a model's padding rows) are empty.
        """
        table, special = self._bytes, self.special_ids
        if skip_special_tokens:
            ids = [i for i in ids if i not in special]
        data = b"".join([table[i] for i in ids])
        return (data if continuation else self._bytes.at_start(ids, data)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that the token adds to a text in progress; empty for an id without a token."""
        return self._bytes[token_id]

    def leading_bytes(self, token_id: int) -> bytes:
        """The bytes of the token when it is the first of a text: without the space that marks a word's beginning."""
        return self._bytes.at_start([token_id], self._bytes[token_id])

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None for an id without one."""
        return self._parsing.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling."""
        return self._parsing.token_to_id(token)


class _GuardedTwin:
    """Encodes guarded chats in one pass, so that words meet the library's rules exactly as in an unguarded one.

    Each special token that the template wrote is replaced by a private added token, the rest is encoded as plain text,
    and the private ids are replaced back in order. The private tokens are random, so no text can hold one.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        secret = secrets.token_hex(8)
        self._slots: dict[tuple[bool, bool], str] = {}
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: (i, token.lstrip, token.rstrip) for i, token in added.items() if token.special}
        for lstrip in (False, True):
            for rstrip in (False, True):
                content = f"\ufdd2{secret}{lstrip:d}{rstrip:d}\ufdd3"
                self._slots[lstrip, rstrip] = content
                backend.add_tokens(
                    [tokenizers.AddedToken(content, lstrip=lstrip, rstrip=rstrip, normalized=False, special=False)]
                )
        self._slot_ids = {backend.token_to_id(content) for content in self._slots.values()}
        self._backend = backend
        specials = special_pattern(list(self._special))
        self._pieces = re.compile(f"{GUARD_START}({specials}){GUARD_END}|({specials})|[{GUARD_START}{GUARD_END}]")

    def encode(self, guarded: str) -> list[int]:
        written: list[int] = []

        def replace(match: re.Match[str]) -> str:
            if match.group(1) is not None:
                return match.group(1)
            if match.group(2) is None:
                return ""
            token_id, lstrip, rstrip = self._special[match.group(2)]
            written.append(token_id)
            return self._slots[lstrip, rstrip]

        ids = _encode(self._backend, self._pieces.sub(replace, guarded))
        specials = iter(written)
        return [next(specials) if i in self._slot_ids else i for i in ids]


def special_pattern(contents: Sequence[str]) -> str:
    """A regular expression for any of the strings, the longest first; one that never matches for none."""
    return "|".join(re.escape(content) for content in sorted(contents, key=len, reverse=True)) or "(?!)"


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Without the offsets, which cost as much again and are put together under the GIL."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError("the text is not valid Unicode: it holds a lone surrogate") from None


def _with_edge(ids: list[int], token_id: int | None, *, wanted: bool, at_start: bool) -> list[int]:
    if token_id is None:
        return ids
    rest = [i for i in ids if i != token_id]
    if not wanted:
        return rest
    return [token_id, *rest] if at_start else [*rest, token_id]
