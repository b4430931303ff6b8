"""The part of `stream.py` that reads over HTTP from a loopback store: ours, plain clients at the same depth, peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from peers import store
from peers.cases import CASES
from peers.clients import CLIENTS
from peers.harness import LISTING
from peers.machine import Machine
from peers.rows import ROW_BYTES
from peers.venvs import python_of
from stream_disk import Runs, median, say

DEPTHS = {"delayed": 16, "plain": 4}
"""Reads in flight, of ours and of the clients: 16 connections of 80 MB/s; without delay, what two cores can use."""
IMAGES_PER_SECOND = 71.0
"""SDXL's UNet at 256 px on an A100 80 GB at 28 % of its peak, the utilisation that was published for SD2."""
PACED_BATCH = 16
PEERS = ("mds", "hf_parquet")
"""Those that read from a plain HTTP server or an unsigned S3 one."""


def publish(folder: Path) -> None:
    """Writes the listing that HTTP readers need: files, and the byte ranges of blocks in a shuffled order."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".parquet")
    shards = sorted({name.split(".")[0] for name in names if name.count(".") == 2})
    blocks = []
    for shard in shards:
        files = [name for name in names if name.startswith(f"{shard}.")]
        groups = [pq.ParquetFile(folder / name).metadata for name in files]
        for at in range(groups[0].num_row_groups):
            ranges = []
            for name, metadata in zip(files, groups, strict=True):
                group = metadata.row_group(at)
                columns = [group.column(column) for column in range(group.num_columns)]
                start = min(column.data_page_offset for column in columns)
                ends = [column.data_page_offset + column.total_compressed_size for column in columns]
                ranges.append((name, start, max(ends)))
            blocks.append({"rows": groups[0].row_group(at).num_rows, "ranges": ranges})
    np.random.default_rng(0).shuffle(blocks)  # type: ignore[arg-type]
    (folder / LISTING).write_text(json.dumps({"files": names, "blocks": blocks}))


def remote(
    machine: Machine,
    folder: Path,
    cache: Path,
    *,
    rows: int,
    repeats: int,
    batch: int,
    peers: tuple[str, ...],
) -> dict[str, Any]:
    """Runs the remote cases over `folder`/ours and the peers' folders that are there."""
    if (problem := store.missing()) is not None:
        say(f"remote: left out, {problem}")
        return {"skipped": problem}
    publish(folder / "ours")
    found: dict[str, Any] = {}
    for kind, depth in DEPTHS.items():
        with machine.turn(), store.serving(folder, delayed=kind == "delayed") as address:
            found[kind] = _compare(
                machine, address, cache, kind=kind, depth=depth, rows=rows, repeats=repeats, batch=batch
            )
            for name in peers:
                if (folder / CASES[name].data).exists():
                    publish(folder / CASES[name].data)
                    found[kind].setdefault("peers", {})[name] = _peer(machine, address, cache, name, batch)
            if kind == "delayed":
                found["paced"] = _paced(machine, address, rows)
    return found


def _compare(
    machine: Machine, address: str, cache: Path, *, kind: str, depth: int, rows: int, repeats: int, batch: int
) -> dict[str, Any]:
    url = f"{address}/ours"
    more = ["--batch", str(batch), "--depth", str(depth)]
    runs: dict[str, Runs] = {}
    errors: dict[str, str] = {}
    ours = ["ours", "ours", url, *more, "--samples", str(2 * rows)]
    clients = {name: ["clients", name, url, *more] for name in CLIENTS}
    for turn in range(repeats):
        # Ours beside each client, since what a loopback store gives changes from minute to minute.
        names = ("isthmus", *CLIENTS)
        with machine.turn():
            for name in names if turn % 2 == 0 else reversed(names):
                if name in errors:
                    continue
                python = python_of(None if name == "isthmus" else "clients", cache)
                result = machine.run(python, ours if name == "isthmus" else clients[name])
                if "error" in result:
                    errors[name] = result["error"]
                    say(f"{kind} {name}: {result['error']}")
                    continue
                runs.setdefault(name, []).append(result)
                say(f"{kind} {name}: {result['samples_per_s']:,.0f} samples/s")
    clients_found = {
        name: {
            "samples_per_s": median(run["samples_per_s"] for run in of),
            "mb_per_s": median(run["samples_per_s"] for run in of) * ROW_BYTES / 1e6,
            "cpu_s_per_gb": median(run["cpu_s"] / (run["samples"] * ROW_BYTES / 1e9) for run in of),
            "first_batch_s": median(run["first_batch_s"] for run in of),
        }
        for name, of in runs.items()
    }
    found: dict[str, Any] = {"depth": depth, "readers": clients_found, "errors": errors}
    rates = {name: value["samples_per_s"] for name, value in clients_found.items()}
    if "isthmus" in rates and "obstore" in rates:
        # The best of the clients that sign, retry and speak to a cloud; http.client is a bare connection.
        best = max(
            (name for name in rates if name not in ("isthmus", "http_client")), key=lambda name: rates[name]
        )
        found |= {
            "best_client": best,
            "ratio_to_best_client": rates["isthmus"] / rates[best],
            "ratio_to_obstore": rates["isthmus"] / rates["obstore"],
        }
    return found


def _peer(machine: Machine, address: str, cache: Path, name: str, batch: int) -> dict[str, Any]:
    case = CASES[name]
    url = f"s3://{case.data}" if name == "mds" else f"{address}/{case.data}"
    environment = {
        "S3_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    result = machine.run(
        python_of(case.environment, cache),
        [case.module, name, url, "--batch", str(batch)],
        environment=environment,
    )
    say(f"remote {name}: {result.get('error') or round(result['samples_per_s_over_all'])} samples/s")
    kept = ("samples", "samples_per_s", "samples_per_s_over_all", "first_batch_s", "error")
    return {name: result[name] for name in kept if name in result}


def _paced(machine: Machine, address: str, rows: int) -> dict[str, Any]:
    samples = min(rows, round(20 * IMAGES_PER_SECOND))
    result = machine.run(
        python_of(None, Path()),
        [
            *("ours", "ours", f"{address}/ours", "--batch", str(PACED_BATCH)),
            *("--samples", str(samples), "--pace", str(IMAGES_PER_SECOND)),
        ],
    )
    say(f"paced: {result.get('error') or round(result['wait_fraction'], 4)} of the time waited")
    return result
