"""Server-sent events out of bytes as they come off the wire."""

from __future__ import annotations


class EventParser:
    """feed(bytes) -> the data of the events that are complete. Lines may end in LF or CRLF, comments are skipped, several
    data lines of one event are joined, and characters may be cut anywhere between two reads."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [event for line in lines if (event := self._line(line)) is not None]

    def close(self) -> list[str]:
        """What an event whose blank line never came holds: some servers end the stream without it."""
        events = [event for line in (self._rest, b"") if (event := self._line(line)) is not None]
        self._rest = b""
        return events

    def _line(self, line: bytes) -> str | None:
        line = line.removesuffix(b"\r")
        if not line:
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        return None
