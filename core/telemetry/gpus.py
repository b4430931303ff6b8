"""GPUs of this node: load and memory from nvidia-smi, energy from NVML's counter where there is one."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_FIELDS = "utilization.gpu,memory.used,memory.total,power.draw"
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class GPUReading:
    """One GPU at one moment; None where the driver has no figure (MIG slices, some laptop parts)."""

    utilization: float | None
    """Percent of the last moments in which a kernel ran. Busy is not the same as tensor cores in use."""
    memory: float | None
    """Percent of memory in use (`utilization.memory` would be the share of time it was read or written)."""
    power_watts: float | None


def read_gpus(command: Sequence[str] = ("nvidia-smi",)) -> list[GPUReading]:
    """Readings of all GPUs, in the driver's order; empty when there is no driver or it does not answer."""
    try:
        answer = subprocess.run(
            [*command, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [reading for line in answer.stdout.splitlines() if (reading := _parse(line)) is not None]


def _parse(line: str) -> GPUReading | None:
    cells = [_number(cell) for cell in line.split(",")]
    if len(cells) != 4:
        return None
    utilization, used, total, power = cells
    memory = 100 * used / total if used is not None and total else None
    return GPUReading(utilization, memory, power)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:  # "[N/A]", "[Not Supported]", "[Unknown Error]"
        return None


class EnergyCounter:
    """NVML's total energy of all GPUs since the driver was loaded.

    Spoken to through ctypes: three calls do not justify a dependency.

    Args:
        load: opens the shared library; tests hand in a fake.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._handles: list[ctypes.c_void_p] = []
        try:
            self._nvml = load("libnvidia-ml.so.1")
        except OSError:
            return
        count = ctypes.c_uint()
        if self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
                return
            handles.append(handle)
        self._handles = handles

    def joules(self) -> float | None:
        """Sum over the GPUs; None when any of them has no counter (before Volta, or no driver)."""
        total = 0
        for handle in self._handles:
            millijoules = ctypes.c_ulonglong()
            if self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
                return None
            total += millijoules.value
        return total / 1000 if self._handles else None
