"""One row of system metrics for this node."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from isthmus.core.telemetry.fabric import received_bytes, received_since
from isthmus.core.telemetry.gpus import EnergyCounter, GPUReading, read_gpus


class SystemProbe:
    """Measures this node; what cannot be measured here is absent from the row, never zero.

    Rates and energy cover the time since the previous :meth:`sample`, so the first row has neither.

    Args:
        proc: the root of procfs; absent on macOS.
        sys: the root of sysfs.
        nvidia_smi: the command that lists GPUs.
        disk: a path on the file system whose free space matters (the working directory by default).
        energy: NVML's energy counter; without one, power is integrated between samples (trapezoid).
        clock: monotonic seconds, for rates.
        wall: Unix seconds, for the row's ``time``.
    """

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        nvidia_smi: Sequence[str] = ("nvidia-smi",),
        disk: Path | None = None,
        energy: EnergyCounter | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._proc, self._sys, self._nvidia_smi = proc, sys, nvidia_smi
        self._disk = disk or Path.cwd()
        self._energy = energy if energy is not None else EnergyCounter()
        self._clock, self._wall = clock, wall
        self._at: float | None = None
        self._cpu: tuple[int, int] | None = None
        self._fabric: dict[str, int] = {}
        self._joules: float | None = None
        self._watts: float | None = None

    def sample(self) -> dict[str, float]:
        """One row.

        Keys: ``time`` (Unix seconds), ``cpu_percent``, ``memory_used_percent``, ``disk_free_bytes``,
        ``gpu_utilization`` and ``gpu_memory`` (percent, mean over the GPUs), ``gpu_energy_kilojoules``
        (all GPUs, since the previous row), ``fabric_gigabytes_per_s`` (received, mean since the
        previous row, 1e9 bytes).
        """
        now = self._clock()
        elapsed = now - self._at if self._at is not None else None
        self._at = now
        row = {
            "time": self._wall(),
            "cpu_percent": self._cpu_percent(),
            "memory_used_percent": self._memory_percent(),
            "disk_free_bytes": self._disk_free(),
            "fabric_gigabytes_per_s": self._fabric_rate(elapsed),
            **self._gpus(elapsed),
        }
        return {key: value for key, value in row.items() if value is not None}

    def _cpu_percent(self) -> float | None:
        try:
            first = (self._proc / "stat").read_text().split("\n", 1)[0].split()
            ticks = [int(cell) for cell in first[1:9]]  # guest time (9, 10) is already in user time
        except (OSError, ValueError):
            return None
        if len(ticks) < 4:
            return None
        idle = ticks[3] + (ticks[4] if len(ticks) > 4 else 0)  # waiting for I/O is idle
        before, self._cpu = self._cpu, (sum(ticks), idle)
        if before is None or self._cpu[0] <= before[0]:
            return None
        busy = 1 - (idle - before[1]) / (self._cpu[0] - before[0])
        return 100 * min(1.0, max(0.0, busy))

    def _memory_percent(self) -> float | None:
        fields: dict[str, int] = {}
        try:
            for line in (self._proc / "meminfo").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in ("MemTotal", "MemAvailable"):
                    fields[name] = int(rest.split()[0])
            return 100 * (1 - fields["MemAvailable"] / fields["MemTotal"])
        except (OSError, ValueError, KeyError, IndexError, ZeroDivisionError):
            return None

    def _disk_free(self) -> float | None:
        try:
            return shutil.disk_usage(self._disk).free
        except OSError:
            return None

    def _fabric_rate(self, elapsed: float | None) -> float | None:
        before, self._fabric = self._fabric, received_bytes(self._sys)
        received = received_since(before, self._fabric)
        return received / elapsed / 1e9 if received is not None and elapsed else None

    def _gpus(self, elapsed: float | None) -> dict[str, float | None]:
        gpus = read_gpus(self._nvidia_smi)
        return {
            "gpu_utilization": _mean([gpu.utilization for gpu in gpus]),
            "gpu_memory": _mean([gpu.memory for gpu in gpus]),
            "gpu_energy_kilojoules": self._energy_kilojoules(gpus, elapsed),
        }

    def _energy_kilojoules(self, gpus: list[GPUReading], elapsed: float | None) -> float | None:
        powers = [gpu.power_watts for gpu in gpus if gpu.power_watts is not None]
        # A partial sum would look like a saving: power counts only when every GPU tells it.
        watts = sum(powers) if powers and len(powers) == len(gpus) else None
        watts_before, self._watts = self._watts, watts
        joules_before, self._joules = self._joules, self._energy.joules()
        if self._joules is not None and joules_before is not None and self._joules >= joules_before:
            return (self._joules - joules_before) / 1000
        if watts is not None and watts_before is not None and elapsed:
            return (watts + watts_before) / 2 * elapsed / 1000
        return None


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
