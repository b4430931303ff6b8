"""Receive counters of the network between nodes: InfiniBand and EFA, from sysfs."""

from __future__ import annotations

from pathlib import Path

_WORD = 4  # InfiniBand's PortRcvData counts 32-bit words (InfiniBand Architecture 1.3, section 16.1.3.5)


def received_bytes(sys: Path) -> dict[str, int]:
    """Bytes received so far by each port, ``{"mlx5_ib0/1": ...}``.

    ``hw_counters/rx_bytes`` (EFA) is in bytes and covers RDMA reads and writes;
    ``counters/port_rcv_data`` (InfiniBand) is in words of 4 bytes. Ports whose link layer is Ethernet
    are left out: on clouds they carry storage and control traffic, not collectives.

    Args:
        sys: the root of sysfs, normally ``/sys``.
    """
    counters: dict[str, int] = {}
    for port in sorted((sys / "class" / "infiniband").glob("*/ports/*")):
        name = f"{port.parent.parent.name}/{port.name}"
        efa = _read(port / "hw_counters" / "rx_bytes")
        if efa is not None:
            counters[name] = efa
            continue
        words = _read(port / "counters" / "port_rcv_data")
        if words is not None and _text(port / "link_layer") != "Ethernet":
            counters[name] = _WORD * words
    return counters


def received_since(before: dict[str, int], now: dict[str, int]) -> int | None:
    """Bytes received between two readings; None without a port in both. A port that was reset counts zero."""
    ports = before.keys() & now.keys()
    if not ports:
        return None
    return sum(max(0, now[port] - before[port]) for port in ports)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _read(path: Path) -> int | None:
    try:
        return int(_text(path) or "")
    except ValueError:
        return None
