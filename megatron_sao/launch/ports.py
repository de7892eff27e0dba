"""Ports that stay ours until the server that is started on them listens, which takes SGLang up to a minute."""

from __future__ import annotations

import socket


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """A socket bound to ``port`` of ``host`` (0: any free one) that does not listen.

    While it is open the kernel gives the port to nobody who asks for a free one or connects to somewhere; a server that
    names the port can still listen on it, since servers bind with SO_REUSEADDR as this does.

    Raises:
        OSError: another program listens there, or ``host`` is no address of this machine.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
    except OSError:
        reserved.close()
        raise
    return reserved


def port_of(reserved: socket.socket) -> int:
    return reserved.getsockname()[1]
