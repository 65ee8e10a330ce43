"""The text layer: chat templates, tokenizing, detokenizing, stop strings. Runs in the API process; imports no torch."""

from __future__ import annotations

from .chat_template import ChatTemplate, TemplateError
from .detokenizer import IncrementalDetokenizer, StopChecker, StopResult, TextStream, TokenPiece
from .tokenizer import RenderedPrompt, Tokenizer, TokenizerSpec

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "RenderedPrompt",
    "StopChecker",
    "StopResult",
    "TemplateError",
    "TextStream",
    "TokenPiece",
    "Tokenizer",
    "TokenizerSpec",
]
