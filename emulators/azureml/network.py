"""The virtual network of one job: a switch between its nodes, and this machine's services on each node's own loopback.

A script of its own, stdlib only; needs root. Reads one JSON line {"nodes": [{"pid", "address"}], "ports": [...]}, says
"ready", and ends when its input does; namespaces, links and relays end with it, and nothing of this machine is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable

CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
CHUNK = 1 << 18


def main() -> int:
    """Serves until the end of input."""
    task = json.loads(sys.stdin.buffer.readline())
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    listeners = _connect(task["nodes"], task["ports"])
    _enter(here)
    print("ready", flush=True)
    asyncio.run(_serve(listeners))
    return 0


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _connect(nodes: list[dict[str, str]], ports: list[int]) -> list[tuple[socket.socket, int]]:
    """Wires the nodes up; listeners on the loopback of each, with the port of this machine that they stand for."""
    if _LIBC.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    switch = os.open("/proc/self/ns/net", os.O_RDONLY)
    links = [f"link add v{i} type veth peer name eth0 netns {node['pid']}" for i, node in enumerate(nodes)]
    ups = [f"link set v{i} master br0 up" for i in range(len(nodes))]
    _ip(["link add br0 type bridge", "link set br0 up", *links, *ups])
    listeners = []
    for node in nodes:
        inside = os.open(f"/proc/{node['pid']}/ns/net", os.O_RDONLY)
        _enter(inside)
        _ip([f"addr add {node['address']}/16 dev eth0", "link set eth0 up", "link set lo up"])
        for port in ports:
            listener = socket.create_server(("127.0.0.1", port), backlog=128)
            listeners.append((listener, port))
        _enter(switch)
        os.close(inside)
    return listeners


def _ip(commands: list[str]) -> None:
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands).encode(), check=True)


async def _serve(listeners: list[tuple[socket.socket, int]]) -> None:
    for listener, port in listeners:
        await asyncio.start_server(_relay_to(port), sock=listener, limit=CHUNK)
    loop = asyncio.get_running_loop()
    ended = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
    await ended.read()


def _relay_to(port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port, limit=CHUNK)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, back), _copy(there, writer))

    return relay


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()
    with contextlib.suppress(OSError):
        target.close()


if __name__ == "__main__":
    sys.exit(main())
