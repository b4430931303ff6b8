"""The streamer beside its peers and beside the plain read of the same bytes.

    python benchmarks/stream.py [--json] [--quick] [--skip-peers] [--only NAMES] [--chart PATH]

The same rows (key, caption, mean and log-variance fp16 [4, 64, 64], text fp16 [77, 768], a length: 184 KB) in our
shards, MDS, litData's chunks, parquet, webdataset's tars and HF Arrow files; batches of 64 as torch tensors, shuffled,
page-cached disk. Every case is a process of its own, every peer has an environment of its own, made on the first run.
The consumer looks at one byte of each 4 KiB page of every tensor. Each case first reads an epoch whose rows are
compared with what was written, with its memory watched; then it is timed, in turn with ours and the limit. Peers are
timed over an epoch, ours and the limit over seconds: what starts with a loader is in the time to the first batch.

The limit is `readinto` of our files, front to back, into one reused buffer of a batch's size (which stays in the
processor's cache; the same into as much memory as a shuffle window takes is shown beside it). Ours is a world of one
rank with eight lanes, a shuffle window of 1,024 rows, checksums off as the peers' are (the figure with checksums on is
beside it). A peer counts when it shuffles rows and yields torch batches.

Over HTTP (nginx on loopback, as it is, and with 20 ms to the first byte and 80 MB/s a connection): ours beside
plain clients that read the same ranges at the same depth, and a rank that is paced as a GPU would pace it.

Prints medians and ratios; exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.cases import CASES, DATA
from peers.machine import Machine, facts
from peers.rows import ROW_BYTES
from peers.venvs import cache_folder
from stream_disk import Disk, label, median, peers_of, say
from stream_remote import PEERS, remote
from stream_resume import resume_at_scale
from stream_table import table

BATCH = 64
FAST = ("readinto", "readinto_window", "ours", "ours_checked")
TARGETS = {
    "ratio_to_read": (">=", 0.7),
    "ratio_to_best_peer": (">=", 4.5),
    "resume_ratio": ("<=", 2.0),
    "resume_ratio_at_ten_times_the_rows": ("<=", 2.0),
    "memory_above_limit_bytes": ("<=", 150e6),
    "remote_ratio_to_obstore_delayed": (">=", 0.8),
    "remote_ratio_to_obstore_plain": (">=", 0.5),
    "paced_wait_fraction": ("<=", 0.02),
}


def wanted(names: str | None, skip_peers: bool) -> set[str]:
    """The cases and parts to run."""
    every = {*CASES, "remote", "resume"}
    if names is not None:
        chosen = set(names.split(","))
        if chosen - every:
            raise SystemExit(
                f"--only: {', '.join(sorted(chosen - every))}; there are {', '.join(sorted(every))}"
            )
        return chosen | {"ours", "readinto"}
    if skip_peers:
        return {*FAST, "remote", "resume"}
    return every


def measure(disk: Disk, chosen: set[str], far_peers: tuple[str, ...]) -> dict[str, Any]:
    """Runs everything that was chosen; `far_peers` are read over HTTP, too."""
    found: dict[str, Any] = {}
    disk.make("ours")
    fast = [(name, 0) for name in FAST if name in chosen]
    hand = [("by_hand", workers) for workers in CASES["by_hand"].workers if "by_hand" in chosen]
    fast, hand = ([key for key in keys if disk.compare(*key)] for keys in (fast, hand))
    groups = peer_groups(disk, chosen) or [[]]
    for number, group in enumerate(groups):
        # What is not timed comes first, so that the machine is held for no longer than it must.
        ready: dict[str, list[tuple[str, int]]] = {}
        for data in group:
            disk.make(data)
            keys = [(name, workers) for name, case in peers_of(data) for workers in case.workers]
            ready[data] = [key for key in keys if key[0] in chosen and disk.compare(*key)]
        with disk.machine.turn():
            if number == 0:
                disk.rounds(fast)
                disk.start("ours", 0, disk.repeats)
                disk.rounds(hand)
            for keys in ready.values():
                disk.rounds([("readinto", 0), ("ours", 0), *keys])
                for name in dict.fromkeys(name for name, _ in keys):
                    if (best := disk.best([name])) is not None and CASES[name].counted:
                        disk.start(*best, 3)
            if number == len(groups) - 1:
                found |= measure_rest(disk, chosen, far_peers)
        if len(groups) > 1:
            for data in group:
                if not ("remote" in chosen and any(CASES[name].data == data for name in far_peers)):
                    disk.drop(data)
    found["cases"] = disk.summary()
    return found | ratios(disk, found)


def measure_rest(disk: Disk, chosen: set[str], far_peers: tuple[str, ...]) -> dict[str, Any]:
    """What is not read from the disk, or is small."""
    found: dict[str, Any] = {}
    if "remote" in chosen:
        for name in far_peers:
            disk.make(CASES[name].data)
        found["remote"] = remote(
            disk.machine,
            disk.folder,
            disk.cache,
            rows=disk.rows,
            repeats=disk.repeats,
            batch=disk.batch,
            peers=far_peers,
        )
    if "resume" in chosen:
        found["resume_at_scale"] = resume_at_scale(disk.folder, min(disk.rows, 10_240))
    return found


def peer_groups(disk: Disk, chosen: set[str]) -> list[list[str]]:
    """Formats that lie on the disk together: all when it has room, else one at a time."""
    data = [name for name in DATA if any(peer in chosen for peer, _ in peers_of(name))]
    each = len(data) if shutil.disk_usage(disk.folder).free > 2 * len(data) * disk.rows * ROW_BYTES else 1
    return [data[at : at + each] for at in range(0, len(data), max(each, 1))]


def ratios(disk: Disk, found: dict[str, Any]) -> dict[str, Any]:
    """What the targets speak of."""
    from peers.ours import MEMORY_LIMIT

    result: dict[str, Any] = {}
    ours, limit = ("ours", 0), ("readinto", 0)
    if disk.runs.get(ours) and disk.runs.get(limit):
        result["ratio_to_read"] = disk.ratio(ours, limit)
        for name in ("ours_checked", "readinto_window"):
            if disk.runs.get((name, 0)):
                result[f"{name}_to_read"] = disk.ratio((name, 0), limit)
        best = disk.best([name for name, case in CASES.items() if case.counted])
        if best is not None:
            result |= {"best_peer": label(*best), "ratio_to_best_peer": disk.ratio(ours, best)}
    starts = disk.starts.get(ours)
    if starts and starts["resumed"]:
        result["resume_ratio"] = median(starts["resumed"]) / median(starts["cold"])
    if "resume_at_scale" in found:
        result["resume_ratio_at_ten_times_the_rows"] = found["resume_at_scale"]["ratio"]
    watched = disk.watched.get(ours, {})
    if "peak_pss_bytes" in watched:
        above = watched["peak_pss_bytes"] - watched["imported_bytes"]
        result |= {"memory_above_imports_bytes": above, "memory_above_limit_bytes": above - MEMORY_LIMIT}
    far = found.get("remote", {})
    clients = {kind: far[kind] for kind in ("delayed", "plain") if "ratio_to_obstore" in far.get(kind, {})}
    if clients:
        result["remote_ratio_to_best_client"] = {
            kind: value["ratio_to_best_client"] for kind, value in clients.items()
        }
        result["best_client"] = {kind: value["best_client"] for kind, value in clients.items()}
        for kind, value in clients.items():
            result[f"remote_ratio_to_obstore_{kind}"] = value["ratio_to_obstore"]
    if "wait_fraction" in far.get("paced", {}):
        result["paced_wait_fraction"] = far["paced"]["wait_fraction"]
    return result


def judge(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each target that was measured: value, bound, whether it holds."""
    found = {}
    for name, (sense, bound) in TARGETS.items():
        if name in result:
            holds = result[name] >= bound if sense == ">=" else result[name] <= bound
            found[name] = {"value": result[name], "target": f"{sense} {bound:g}", "holds": holds}
    return found


def main() -> int:
    """Measures and prints; 1 when a target was missed, or ours failed."""
    parser = argparse.ArgumentParser(description="The streamer beside its peers and the plain read.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rows", type=int, default=10_240, help="rows of 184 KB")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each case")
    parser.add_argument(
        "--only", metavar="NAMES", help="these cases, with commas; `remote` and `resume` are parts"
    )
    parser.add_argument("--skip-peers", action="store_true", help="ours, the limit, and plain clients only")
    parser.add_argument("--quick", action="store_true", help="2,048 rows")
    parser.add_argument("--chart", type=Path, help="draw the result as a PNG")
    parser.add_argument("--folder", type=Path, help="where the temporary data goes; 2 to 8 GB")
    parser.add_argument(
        "--cache", type=Path, default=cache_folder(), help="where the peers' environments are"
    )
    parser.add_argument("--lock", type=Path, help="a file that is locked while a case runs")
    parser.add_argument(
        "--wait",
        type=float,
        default=20.0,
        help="seconds a run waits for a quiet machine; 0: takes it as it is",
    )
    options = parser.parse_args()
    rows = 2048 if options.quick else options.rows
    chosen = wanted(options.only, options.skip_peers)
    folder = Path(tempfile.mkdtemp(prefix="isthmus-stream-", dir=options.folder))
    machine = Machine(lock=options.lock, wait_s=options.wait, tries=2 if options.wait else 1)
    disk = Disk(machine, folder, options.cache, rows, options.repeats, BATCH, max(32 * rows, 327_680))
    try:
        found = measure(disk, chosen, () if options.skip_peers else PEERS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result: dict[str, Any] = {
        "machine": facts() | {name: version(name) for name in ("torch", "numpy", "pyarrow")},
        "rows": rows,
        "row_bytes": ROW_BYTES,
        "batch": BATCH,
        "repeats": options.repeats,
        **found,
    }
    result["targets"] = judge(result)
    result["holds"] = all(target["holds"] for target in result["targets"].values())
    print(json.dumps(result, indent=2) if options.json else table(result))
    if options.chart is not None:
        from stream_chart import draw

        draw(result, options.chart, options.cache)
    if ("ours", 0) in disk.errors:
        say(f"isthmus failed: {disk.errors['ours', 0]}")
        return 1
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
