"""The arithmetic of batches: world size | lanes | global batch size, and accumulation."""

from __future__ import annotations


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def world_sizes(lanes: int, global_batch_size: int, micro_batch_size: int = 1) -> list[int]:
    """World sizes W with W | lanes, lanes | global_batch_size and W x micro_batch_size | global_batch_size.

    Empty when lanes do not divide the batch.
    """
    if global_batch_size % lanes:
        return []
    return [size for size in divisors(lanes) if global_batch_size % (size * micro_batch_size) == 0]


def nearest_multiple(number: int, of: int) -> int:
    """The multiple of ``of`` nearest to a number, at least ``of``."""
    return max(of, (number + of // 2) // of * of)
