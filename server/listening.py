"""The listening socket. Light to import: it is bound before anything else, so that a taken port is told at once."""

from __future__ import annotations

import ipaddress
import socket

from hotswap.core.errors import HotswapError

BACKLOG = 2048
SEND_BUFFER_BYTES = 128 * 1024  # the kernel doubles it; on its own it would hold megabytes for each reader that stalls


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises HotswapError when the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise HotswapError(f"cannot listen on {host}: {error.strerror}; choose another --host") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # every connection inherits it
        listener.bind(address)
        listener.listen(BACKLOG)  # now, so that a second server is refused now
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise HotswapError(f"cannot listen on {host} port {port}: {reason}; choose another --port or --host") from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
