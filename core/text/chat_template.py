"""Chat templates: the one place where Jinja of a model or a request is rendered.

Every route renders through `ChatTemplate.render`: the sandbox, the gate for request-supplied templates, the filter for
keyword arguments and the marking of users' special-token strings therefore hold on all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ..errors import RequestError
from .messages import normalize_messages, plain_data
from .template_worker import render_in_worker
from .tokenizer import GUARD_END, GUARD_START, RenderedPrompt, Tokenizer, special_pattern

MAX_TEMPLATE_CHARS = 1 << 20
MAX_REQUEST_TEMPLATE_CHARS = 1 << 16
RESERVED = frozenset(
    [
        *("messages", "tools", "documents", "chat_template", "tokenize", "return_dict", "return_tensors", "padding"),
        *("add_generation_prompt", "continue_final_message", "truncation", "max_length"),
        *("raise_exception", "strftime_now"),
    ]
)
_CONTINUE_MARK = "\ufdd4\ufdd5"  # put at the end of the message to go on from; no text has it
_PROBE = "hotswap-probe-7f3a"


class TemplateError(RequestError):
    """A template cannot be compiled, refuses the conversation, or fails on it."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote; for serving, only its body counts."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` that chat templates are written for: plain JSON, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment(now: Callable[[], datetime] = datetime.now) -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The sandbox with what chat templates expect in it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        optimized=False,  # folding constants would run a part of the template while it is compiled
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


class ChatTemplate:
    """A compiled template. Immutable and thread-safe after construction."""

    def __init__(
        self,
        source: str,
        *,
        named_special_tokens: Mapping[str, str] | None = None,
        special_tokens: Sequence[str] = (),
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """named_special_tokens: `bos_token` and the like, for the template to print.

        special_tokens: strings that the tokenizer reads as control tokens; in users' strings they are marked as text.
        Raises TemplateError when `source` does not compile.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(
                f"the chat template is over {MAX_TEMPLATE_CHARS} characters long", param="chat_template"
            )
        self.source = source
        self._named = dict(named_special_tokens or {})
        self._specials = tuple(special_tokens)
        self._guard = _Guard(self._specials)
        self._environment = make_environment(now)
        try:
            self._template = self._environment.from_string(source)
            tree = self._environment.parse(source)
            names = jinja2.meta.find_undeclared_variables(tree)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise TemplateError(
                f"the chat template does not compile: {_reason(error)}", param="chat_template"
            ) from error
        self.argument_names: frozenset[str] = frozenset(names) - RESERVED - frozenset(self._named)
        # Whether it reads `tools`, and so can tell the model of them.
        self.uses_tools = any(node.name == "tools" and node.ctx == "load" for node in tree.find_all(jinja2.nodes.Name))

    @classmethod
    def for_tokenizer(cls, source: str, tokenizer: Tokenizer) -> ChatTemplate:
        """With everything that the template needs to know of the tokenizer that will read its prompts."""
        return cls(
            source,
            named_special_tokens=tokenizer.named_special_tokens,
            special_tokens=list(tokenizer.special_tokens),
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        request_template: str | None = None,
        trust_request_template: bool = False,
        allow_special: bool = False,
    ) -> RenderedPrompt:
        """The prompt of a conversation.

        add_generation_prompt: None means yes, unless the final message is continued. Both at once is an error.
        template_kwargs: only names that the template uses pass, and none that has a meaning of its own here.
        request_template: a template that came with the request. Refused unless the operator trusts such templates; then
            it is rendered in a process of its own, with a deadline.
        tools: as `check_tools` gives them; see `need_tools`.
        allow_special: leave special-token strings in users' text for the tokenizer to read as tokens.
        Raises RequestError, TemplateError among them.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        if request_template is not None:
            _check_request_template(request_template, trusted=trust_request_template)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        chat = normalize_messages(messages)
        arguments = {
            "tools": plain_data(list(tools), "tools") if tools else None,
            "documents": plain_data(list(documents), "documents") if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        kwargs = plain_data(dict(template_kwargs or {}), "chat_template_kwargs")
        chat, arguments, kwargs = (
            self._guard.mark(value, plain=not allow_special) for value in (chat, arguments, kwargs)
        )
        if continue_final_message:
            chat[-1]["content"] += _CONTINUE_MARK
        if request_template is None:
            text = self.complete(chat, arguments, kwargs)
        else:
            text = render_in_worker(request_template, self._named, (chat, arguments, kwargs), TemplateError)
        return RenderedPrompt(_cut_at_mark(text) if continue_final_message else text)

    def complete(self, chat: list[dict[str, Any]], arguments: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str:
        """The text for a conversation that `render` has prepared. Only for `render` and its worker process."""
        return self._render(self._shape(chat), {**arguments, **self.filter_kwargs(kwargs)})

    def need_tools(self) -> None:
        """Raises TemplateError when the template does not read `tools`: the model would not be told of them."""
        if not self.uses_tools:
            raise TemplateError(
                "this model's chat template does not use tools, so the model would not see them: leave them out, or "
                "give a chat template that uses them (--chat-template)",
                param="tools",
            )

    def filter_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `kwargs` that the template reads and that are its own to read."""
        allowed = self.argument_names - self._environment.globals.keys()
        return {name: value for name, value in kwargs.items() if name in allowed}

    def _render(self, chat: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        try:
            return self._template.render({**self._named, **arguments, "messages": chat})
        except (jinja2.TemplateError, RecursionError) as error:
            what = f"the chat template refuses this conversation: {_reason(error)}"
            raise TemplateError(what, param="messages") from error
        except Exception as error:  # a template is a program of someone else: it can raise anything Python can
            what = f"the chat template fails on this conversation: {_reason(error)}"
            raise TemplateError(what, param="messages") from error

    def _shape(self, chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`chat` in the style that the template reads: content as string or parts, arguments as object or string."""
        has_calls = any(message.get("tool_calls") for message in chat)
        if self.content_style == "parts":
            chat = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]
        if has_calls and self.arguments_style == "string":
            for message in chat:
                for call in message.get("tool_calls", ()):
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return chat

    @cached_property
    def content_style(self) -> Literal["string", "parts"]:
        """How the template reads `content`, found by trying: some iterate over parts without looking for a string."""
        parts = [{"type": "text", "text": _PROBE}]
        if self._shows([{"role": "user", "content": _PROBE}]) or not self._shows([{"role": "user", "content": parts}]):
            return "string"
        return "parts"

    @cached_property
    def arguments_style(self) -> Literal["object", "string"]:
        """How the template reads a tool call's arguments: the object, or the JSON string that it pastes in."""

        def chat(arguments: object) -> list[dict[str, Any]]:
            content = "x" if self.content_style == "string" else [{"type": "text", "text": "x"}]
            call = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": arguments}}
            answer = {"role": "assistant", "content": content[:0], "tool_calls": [call]}
            return [
                {"role": "user", "content": content},
                answer,
                {"role": "tool", "content": content, "tool_call_id": "call12345"},
            ]

        wanted = re.compile(rf'"a":\s*"{_PROBE}"')
        shown = self._try(chat({"a": _PROBE}))
        if shown is None or f"'{_PROBE}'" in shown:
            pasted = self._try(chat(json.dumps({"a": _PROBE})))
            if pasted is not None and wanted.search(pasted):
                return "string"
        return "object"

    def _shows(self, chat: list[dict[str, Any]]) -> bool:
        return _PROBE in (self._try(chat) or "")

    def _try(self, chat: list[dict[str, Any]]) -> str | None:
        try:
            return self._render(chat, {"tools": None, "documents": None, "add_generation_prompt": False})
        except TemplateError:
            return None


def _check_request_template(source: str, *, trusted: bool) -> None:
    """The gate. A request's template is not even compiled in this process."""
    if not trusted:
        raise RequestError(
            "chat_template is not accepted with a request; the operator can allow it with "
            "--trust-request-chat-template",
            param="chat_template",
        )
    if not isinstance(source, str) or len(source) > MAX_REQUEST_TEMPLATE_CHARS:
        what = f"chat_template must be a string of at most {MAX_REQUEST_TEMPLATE_CHARS} characters"
        raise TemplateError(what, param="chat_template")


def _reason(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return re.sub(r" object at 0x[0-9a-f]+", " object", text)


def _cut_at_mark(text: str) -> str:
    head, mark, _ = text.rpartition(_CONTINUE_MARK)
    if not mark:
        raise TemplateError(
            "continue_final_message cannot be used here: the chat template leaves the final message out",
            param="messages",
        )
    return head.replace(_CONTINUE_MARK, "")


class _Guard:
    """Marks special-token strings in users' data, so that the tokenizer can tell them from the template's own."""

    def __init__(self, specials: Sequence[str]) -> None:
        self._whole = re.compile(special_pattern(specials))
        self._beginnings = frozenset(special[:n] for special in specials for n in range(1, len(special)))
        self._longest = max((len(beginning) for beginning in self._beginnings), default=0)
        self._private = re.compile("[\ufdd0-\ufdef]")

    def mark(self, value: Any, *, plain: bool = True) -> Any:
        """A copy of JSON data, marked if it is to be plain text. Noncharacters, which only a forger sends, go."""
        if isinstance(value, str):
            if not value.isascii():
                value = self._private.sub("", value)
            if not plain:
                return value
            marked = self._whole.sub(lambda match: f"{GUARD_START}{match.group()}{GUARD_END}", value)
            # An unfinished special token at the end could be finished by what the template prints next.
            return marked + GUARD_END if self._ends_unfinished(value) else marked
        if isinstance(value, dict):
            return {self.mark(key, plain=plain): self.mark(item, plain=plain) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item, plain=plain) for item in value]
        return value

    def _ends_unfinished(self, value: str) -> bool:
        return any(value[-n:] in self._beginnings for n in range(1, min(self._longest, len(value)) + 1))
