"""SystemProbe against made-up procfs, sysfs, nvidia-smi and NVML."""

from __future__ import annotations

import ctypes
import stat
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.telemetry.fabric import received_bytes
from isthmus.core.telemetry.gpus import EnergyCounter, read_gpus
from isthmus.core.telemetry.probe import SystemProbe


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def no_library(name: str) -> Any:
    """A machine without NVML."""
    raise OSError(name)


def write(path: Path, text: str) -> None:
    """Writes a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def smi(folder: Path, lines: list[str], code: int = 0) -> list[str]:
    """A command that answers like nvidia-smi, and only to the query that the probe makes."""
    script = folder / "fake-nvidia-smi"
    answer = "\\n".join(lines)
    script.write_text(
        "#!/bin/sh\n"
        '[ "$1" = "--query-gpu=utilization.gpu,memory.used,memory.total,power.draw" ] || exit 9\n'
        '[ "$2" = "--format=csv,noheader,nounits" ] || exit 9\n'
        f"printf '%b\\n' '{answer}'\nexit {code}\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return [str(script)]


class FakeNVML:
    """The four NVML functions that the counter calls, over a list of millijoules."""

    def __init__(self, millijoules: list[int], *, supported: bool = True) -> None:
        self.millijoules, self.supported = millijoules, supported

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.millijoules)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        handle._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: ctypes.c_void_p, energy: Any) -> int:
        assert handle.value is not None
        energy._obj.value = self.millijoules[handle.value - 1]
        return 0 if self.supported else 3  # NVML_ERROR_NOT_SUPPORTED


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A node with a /proc and one InfiniBand, one EFA and one Ethernet port."""
    write(tmp_path / "proc/stat", "cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 2 3\n")
    write(tmp_path / "proc/meminfo", "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable: 250 kB\n")
    fabric = tmp_path / "sys/class/infiniband"
    write(fabric / "mlx5_ib0/ports/1/counters/port_rcv_data", "1000\n")
    write(fabric / "mlx5_ib0/ports/1/link_layer", "InfiniBand\n")
    write(fabric / "rdmap0/ports/1/hw_counters/rx_bytes", "500\n")
    write(fabric / "rdmap0/ports/1/hw_counters/rdma_read_bytes", "400\n")
    write(fabric / "mlx5_an0/ports/1/counters/port_rcv_data", "999999\n")
    write(fabric / "mlx5_an0/ports/1/link_layer", "Ethernet\n")
    return tmp_path


def probe_of(machine: Path, clock: Clock, **more: Any) -> SystemProbe:
    """A probe that sees only the made-up machine."""
    more.setdefault("nvidia_smi", ["no-such-command-here"])
    more.setdefault("energy", EnergyCounter(no_library))
    return SystemProbe(
        proc=machine / "proc", sys=machine / "sys", disk=machine, clock=clock, wall=clock, **more
    )


def test_first_row_has_no_rates(machine: Path) -> None:
    row = probe_of(machine, Clock()).sample()
    assert row.keys() == {"time", "memory_used_percent", "disk_free_bytes"}
    assert row["time"] == 1000.0
    assert row["memory_used_percent"] == pytest.approx(75.0)
    assert row["disk_free_bytes"] > 0


def test_cpu_percent_counts_waiting_for_io_as_idle_and_guests_once(machine: Path) -> None:
    clock = Clock()
    probe = probe_of(machine, clock)
    probe.sample()
    clock.now += 10
    # 100 ticks more: 30 user (of which 25 guest), 10 system, 50 idle, 10 waiting.
    write(machine / "proc/stat", "cpu  130 0 110 750 110 0 0 0 75 0\n")
    assert probe.sample()["cpu_percent"] == pytest.approx(40.0)


def test_infiniband_counts_words_and_efa_counts_bytes(machine: Path) -> None:
    assert received_bytes(machine / "sys") == {"mlx5_ib0/1": 4000, "rdmap0/1": 500}


def test_fabric_rate_is_over_all_ports_since_the_previous_row(machine: Path) -> None:
    clock = Clock()
    probe = probe_of(machine, clock)
    probe.sample()
    clock.now += 10
    write(machine / "sys/class/infiniband/mlx5_ib0/ports/1/counters/port_rcv_data", str(1000 + 10**10))
    write(machine / "sys/class/infiniband/rdmap0/ports/1/hw_counters/rx_bytes", str(500 + 10**10))
    assert probe.sample()["fabric_gigabytes_per_s"] == pytest.approx(5.0)


def test_a_counter_that_was_reset_is_not_a_negative_rate(machine: Path) -> None:
    clock = Clock()
    probe = probe_of(machine, clock)
    probe.sample()
    clock.now += 10
    write(machine / "sys/class/infiniband/mlx5_ib0/ports/1/counters/port_rcv_data", "0")
    assert probe.sample()["fabric_gigabytes_per_s"] == 0


def test_gpu_figures_are_means_and_memory_is_what_is_used(machine: Path) -> None:
    command = smi(machine, ["90, 40960, 81920, 300.5", "100, 61440, 81920, 399.5"])
    row = probe_of(machine, Clock(), nvidia_smi=command).sample()
    assert row["gpu_utilization"] == pytest.approx(95)
    assert row["gpu_memory"] == pytest.approx(62.5)
    assert "gpu_energy_kilojoules" not in row


def test_energy_is_integrated_from_power_where_there_is_no_counter(machine: Path) -> None:
    clock = Clock()
    probe = probe_of(machine, clock, nvidia_smi=smi(machine, ["90, 1, 2, 300", "90, 1, 2, 300"]))
    probe.sample()
    clock.now += 20
    smi(machine, ["90, 1, 2, 400", "90, 1, 2, 400"])
    assert probe.sample()["gpu_energy_kilojoules"] == pytest.approx((600 + 800) / 2 * 20 / 1000)


def test_energy_counter_is_preferred_to_power(machine: Path) -> None:
    clock, library = Clock(), FakeNVML([5_000_000, 7_000_000])
    command = smi(machine, ["90, 1, 2, 300", "90, 1, 2, 300"])
    probe = probe_of(machine, clock, nvidia_smi=command, energy=EnergyCounter(lambda name: library))
    probe.sample()
    clock.now += 20
    library.millijoules = [6_000_000, 9_500_000]
    assert probe.sample()["gpu_energy_kilojoules"] == pytest.approx(3.5)


def test_a_gpu_without_counter_or_power_gives_no_partial_energy(machine: Path) -> None:
    clock = Clock()
    probe = probe_of(
        machine,
        clock,
        nvidia_smi=smi(machine, ["90, 1, 2, 300", "[N/A], [N/A], [N/A], [Not Supported]"]),
        energy=EnergyCounter(lambda name: FakeNVML([1, 2], supported=False)),
    )
    probe.sample()
    clock.now += 20
    row = probe.sample()
    assert "gpu_energy_kilojoules" not in row
    assert row["gpu_utilization"] == 90


@pytest.mark.parametrize(
    ("lines", "code"), [(["NVIDIA-SMI has failed because"], 9), (["nonsense"], 0), ([""], 0)]
)
def test_a_driver_that_does_not_answer_is_no_gpu(tmp_path: Path, lines: list[str], code: int) -> None:
    assert read_gpus(smi(tmp_path, lines, code)) == []


def test_a_machine_that_tells_nothing_gives_only_the_time(tmp_path: Path) -> None:
    write(tmp_path / "proc/stat", "cpu\n")
    write(tmp_path / "proc/meminfo", "MemTotal: many kB\n")
    write(tmp_path / "sys/class/infiniband/x/ports/1/counters/port_rcv_data", "N/A (no PMA)\n")
    probe = probe_of(tmp_path, Clock())
    probe.sample()
    assert probe.sample().keys() == {"time", "disk_free_bytes"}


def test_this_machine_can_be_measured() -> None:
    probe = SystemProbe()
    probe.sample()
    assert probe.sample()["disk_free_bytes"] > 0
