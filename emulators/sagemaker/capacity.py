"""Instances that a region has: unlimited until a test says otherwise."""

from __future__ import annotations

import threading
from collections import Counter


class Capacity(dict[str, int]):
    """Instance type -> how many there are; "<type> spot" limits spot alone."""

    def __init__(self) -> None:
        super().__init__()
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, instance_type: str, count: int, spot: bool) -> bool:
        """Takes instances if there are enough."""
        keys = [instance_type, *([f"{instance_type} spot"] if spot else [])]
        with self._lock:
            if any(self._used[key] + count > self.get(key, 1 << 30) for key in keys):
                return False
            for key in keys:
                self._used[key] += count
            return True

    def give(self, instance_type: str, count: int, spot: bool) -> None:
        """Gives them back."""
        with self._lock:
            for key in [instance_type, *([f"{instance_type} spot"] if spot else [])]:
                self._used[key] -= count
