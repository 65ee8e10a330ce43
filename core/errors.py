"""The errors that reach a reader. Each says what is wrong, with which value, and what to do; the CLI shows no traceback."""

from __future__ import annotations


class HotswapError(Exception):
    """Base of every error that hotswap raises on purpose. `exit_code` is the process exit status when the CLI meets it."""

    exit_code = 1


class UsageError(HotswapError):
    """The user asked for something that cannot be: a flag, a value, a combination."""

    exit_code = 2


class PluginError(HotswapError):
    """A plugin cannot be chosen, loaded or built as asked."""

    exit_code = 2


class ModelLoadError(HotswapError):
    """A checkpoint is missing, damaged or of a kind that cannot be served."""

    exit_code = 1


class EngineDeadError(HotswapError):
    """The engine process is gone or stuck; the message is its root cause."""

    exit_code = 1


class PlanError(HotswapError):
    """A scheduler tried to build an illegal plan (over budget, unallocated or wrongly shared blocks)."""


class RequestError(HotswapError):
    """A fault that belongs to one request. It ends that request and nothing else.

    `status` is the HTTP status, `param` the offending field and `code` OpenAI's machine-readable code, where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
