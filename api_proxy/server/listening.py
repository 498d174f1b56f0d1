"""The sockets of an endpoint that has several workers.

Workers listen on one socket that they have inherited, so that what waits to be accepted outlives a
worker, and a busy one leaves it to the others. With SO_REUSEPORT, each would have a queue of its
own: the kernel fills it by the clients' addresses whether or not the worker is busy, and resets
what is in it when the worker dies.
"""

from __future__ import annotations

import socket

MOST_WAITING = 2048
"""Connections that wait in the kernel to be accepted."""


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Sockets that workers inherit, one for each address of `host`. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            listeners.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
            one.listen(MOST_WAITING)
    except BaseException:
        for one in listeners:
            one.close()
        raise
    return listeners
