"""The loader beside raw clients on the same store: the same byte ranges, each client at its best depth, one run.

    python benchmarks/store_stream.py [--json FILE] [--repeats 3] [--seconds 4] [--only s3,s3_tls,s3_delayed,blob] [--lock FILE]

S3 is nginx over a folder that is named as a bucket: requests are signed and nothing checks it, so that little of the time is the
server's. `s3_tls` is the same over TLS, `s3_delayed` with 20 ms to the first byte and 80 MB/s a connection. (`rclone serve s3`, which is quick
too, answers range requests with status 200, which obstore refuses; moto is ten times slower and would be all that is measured.)
Blob is Azurite, which is slow and most of what is measured. Ours is the whole loader, signed, retried, shuffled in windows of 1,024 rows over eight lanes, checksums off as the
clients have none; with them is shown beside it. The clients read the ranges of whole blocks (11.8 MB of 64 rows), in a
shuffled order, in threads, and keep nothing. Whoever consumes looks at a byte of each page. Every case is a process of its own, in turn.

Prints medians and ratios; exits 1 where ours is below 0.9 of the best client.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "helpers")]

from servers import (  # noqa: E402
    AZURITE_ACCOUNT,
    AZURITE_KEY,
    azurite_command,
    connection_string,
    free_port,
    nginx_serving,
    running,
)
from tls import certificate  # noqa: E402

WANTED = 0.9
DEPTHS = {"s3": (4, 8), "s3_tls": (2, 4), "s3_delayed": (32, 64), "blob": (4, 16)}
CASES = {
    "s3": ("ours", "ours_checked", "obstore", "boto3"),
    "s3_tls": ("ours", "ours_checked", "obstore", "boto3"),
    "s3_delayed": ("ours", "ours_checked", "obstore", "boto3"),
    "blob": ("ours", "ours_checked", "obstore", "azure_storage_blob"),
}
ROOTS = {
    "s3": "s3://bucket/ours",
    "s3_tls": "s3://bucket/ours",
    "s3_delayed": "s3://bucket/ours",
    "blob": "az://container/ours",
}
Get = Callable[[str, int, int], Any]


def child(
    case: str, store: str, listing: str, depth: int | None, seconds: float, warm: float
) -> dict[str, float]:
    """Reads in this process for some seconds, `warm` ones after the first batch: the adaptive depth has to find itself."""
    batches = _ours(case, store, depth) if case.startswith("ours") else _raw(case, store, listing, depth or 4)
    first = began = 0.0
    processor = size = 0.0
    for bytes_read, _ in batches:
        now = time.perf_counter()
        began = began or now
        if now - began < warm or not first:
            first, processor = now, time.process_time()
            continue
        size += bytes_read
        if now - first >= seconds:
            break
    taken = time.perf_counter() - first
    return {
        "megabytes_per_s": size / taken / 1e6,
        "cpu_s_per_gb": (time.process_time() - processor) / size * 1e9,
    }


def _ours(case: str, store: str, depth: int | None) -> Iterator[tuple[int, int]]:
    import numpy as np
    from peers.rows import ROW_BYTES

    from isthmus.storage.shards import open_dataset
    from isthmus.storage.stream import Loader, Plan, Segment

    dataset = open_dataset(ROOTS[store])
    with Loader(
        [dataset],
        [1],
        seed=0,
        lanes=8,
        shuffle_window=1024,
        stages=[dataset.spec.resolutions[-1]],
        plan=Plan((Segment(0, 0, 0, 64),)),
        memory_limit=2_000_000_000,
        depth=depth,
        check=case == "ours_checked",
    ) as loader:
        for batch in loader:
            arrays = [batch.latent_mean, batch.latent_logvar, *(text.tokens for text in batch.text.values())]
            seen = sum(int(array.reshape(-1).view(np.uint8)[::4096].sum()) for array in arrays)
            yield len(batch) * ROW_BYTES, seen


def _raw(case: str, store: str, listing: str, depth: int) -> Iterator[tuple[int, int]]:
    import numpy as np

    get = {"obstore": _obstore, "boto3": _boto3, "azure_storage_blob": _azure}[case](store, depth)
    ranges = [
        tuple(one) for block in json.loads(Path(listing).read_text())["blocks"] for one in block["ranges"]
    ]
    with ThreadPoolExecutor(depth) as pool:
        waiting: deque[Any] = deque()
        at = 0
        while True:
            while len(waiting) <= 2 * depth:  # a connection never waits for the consumer
                waiting.append(pool.submit(get, *ranges[at % len(ranges)]))
                at += 1
            data = np.frombuffer(waiting.popleft().result(), np.uint8)
            yield data.nbytes, int(data[::4096].sum())


def _obstore(store: str, depth: int) -> Get:
    import obstore
    from obstore.store import AzureStore, S3Store

    del depth
    client: Any
    if store != "blob":
        client = S3Store(
            "bucket",
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            region="us-east-1",
            access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
            client_options={"allow_http": True, "allow_invalid_certificates": True},
        )
    else:
        client = AzureStore(
            "container",
            account_name=AZURITE_ACCOUNT,
            account_key=AZURITE_KEY,
            endpoint=os.environ["BLOB"],
            client_options={"allow_http": True},
        )
    return lambda name, start, end: obstore.get_range(client, f"ours/{name}", start=start, end=end)


def _boto3(store: str, depth: int) -> Get:
    import boto3
    from botocore.config import Config

    assert store != "blob"
    settings = {"max_pool_connections": depth, "response_checksum_validation": "when_required"}
    client = boto3.client("s3", config=Config(s3={"addressing_style": "path"}, **settings))

    def get(name: str, start: int, end: int) -> Any:
        return client.get_object(Bucket="bucket", Key=f"ours/{name}", Range=f"bytes={start}-{end - 1}")[
            "Body"
        ].read()

    return get


def _azure(store: str, depth: int) -> Get:
    from azure.storage.blob import ContainerClient

    assert store == "blob"
    del depth
    # One GET for a range, as the others have.
    size = 64 << 20
    client = ContainerClient.from_connection_string(
        os.environ["AZURE_STORAGE_CONNECTION_STRING"],
        "container",
        max_single_get_size=size,
        max_chunk_get_size=size,
    )

    def get(name: str, start: int, end: int) -> Any:
        return client.download_blob(f"ours/{name}", offset=start, length=end - start).readall()

    return get


@contextlib.contextmanager
def serving(store: str, folder: Path, work: Path) -> Iterator[dict[str, str]]:
    """The dataset in a store; yields the environment that leads to it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "AZURE_"))}
    if store != "blob":
        delay, rate = (0.02, 80e6) if store == "s3_delayed" else (0.0, None)
        (work / store).mkdir()
        pair = certificate(work / store) if store == "s3_tls" else None
        with nginx_serving(folder, work / store, delay_s=delay, bytes_per_s=rate, pair=pair) as address:
            yield (
                own
                | ({"AWS_CA_BUNDLE": str(pair[0])} if pair else {})
                | {
                    "AWS_ENDPOINT_URL": address,
                    "AWS_ACCESS_KEY_ID": "key",
                    "AWS_SECRET_ACCESS_KEY": "secret",
                    "AWS_REGION": "us-east-1",
                    "AWS_DEFAULT_REGION": "us-east-1",
                }
            )
        return
    azurite = azurite_command()
    if azurite is None:
        raise SystemExit("Azurite is missing: make system")
    port = free_port()
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent", "--skipApiVersionCheck"]
    address = f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}"
    with running([*azurite, *options, "--disableTelemetry", "--location", str(work / "blob")], port):
        from azure.storage.blob import ContainerClient

        text = connection_string(address)
        client = ContainerClient.from_connection_string(text, "container")
        client.create_container()
        for path in sorted((folder / "bucket" / "ours").iterdir()):
            with path.open("rb") as file:
                client.upload_blob(f"ours/{path.name}", file)
        yield own | {"AZURE_STORAGE_CONNECTION_STRING": text, "BLOB": address}


def measure(
    store: str, listing: Path, environment: dict[str, str], repeats: int, seconds: float, warm: float
) -> dict[str, Any]:
    """Medians of every case at every depth; the best depth of each counts."""
    runs: dict[tuple[str, int | None], list[dict[str, float]]] = {}
    keys: list[tuple[str, int | None]] = [
        (case, depth)
        for case in CASES[store]
        for depth in (
            (None, *DEPTHS[store]) if case == "ours" else (None,) if case == "ours_checked" else DEPTHS[store]
        )
    ]
    for turn in range(repeats):
        for case, depth in keys if turn % 2 == 0 else reversed(keys):
            told = ["--child", case, "--store", store, "--listing", str(listing), "--seconds", str(seconds)]
            told += ["--warm", str(warm)]
            told += [] if depth is None else ["--depth", str(depth)]
            done = subprocess.run(
                [sys.executable, str(Path(__file__)), *told], env=environment, capture_output=True, text=True,
                timeout=300,
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(f"{store} {case}: {done.stderr.strip()[-500:]}")
            runs.setdefault((case, depth), []).append(json.loads(done.stdout.splitlines()[-1]))
            print(
                f"{store} {case} {depth or 'auto'}: {runs[case, depth][-1]['megabytes_per_s']:.0f} MB/s",
                file=sys.stderr,
                flush=True,
            )
    found = {
        f"{case} {depth or 'auto'}": {
            name: statistics.median(run[name] for run in of) for name in ("megabytes_per_s", "cpu_s_per_gb")
        }
        for (case, depth), of in runs.items()
    }
    rate = {name: value["megabytes_per_s"] for name, value in found.items()}
    clients = {name: value for name, value in rate.items() if not name.startswith("ours")}
    best = max(clients, key=lambda name: clients[name])
    ours = max((name for name in rate if name.startswith("ours ")), key=lambda name: rate[name])
    checked = max(value for name, value in rate.items() if name.startswith("ours_checked"))
    return {
        "cases": found,
        "best_client": best,
        "ours": ours,
        "ratio": rate[ours] / clients[best],
        "ratio_auto": rate["ours auto"] / clients[best],
        "ratio_checked": checked / clients[best],
    }


def main() -> int:
    """Measures and prints; 1 when a target was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2048, help="of 184 KB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a run, after its first batch")
    parser.add_argument("--warm", type=float, default=3.0, help="seconds before that")
    parser.add_argument("--only", default="s3,s3_tls,s3_delayed,blob")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    parser.add_argument("--lock", type=Path, help="a file that is locked while it measures")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--listing", help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.child:
        print(
            json.dumps(child(told.child, told.store, told.listing, told.depth, told.seconds, told.warm)),
            flush=True,
        )
        os._exit(0)  # reads in flight of a client need not be waited for
    from peers import ours
    from peers.harness import LISTING
    from stream_remote import publish as list_blocks

    work = Path(tempfile.mkdtemp(prefix="isthmus-store-stream-"))
    result: dict[str, Any] = {"rows": told.rows, "repeats": told.repeats, "stores": {}}
    try:
        folder = work / "data"
        ours.make("ours", folder / "bucket" / "ours", told.rows)
        list_blocks(folder / "bucket" / "ours")
        listing = work / LISTING
        (folder / "bucket" / "ours" / LISTING).rename(listing)
        with contextlib.ExitStack() as held:
            if told.lock:
                fcntl.flock(held.enter_context(told.lock.open("a")), fcntl.LOCK_EX)
            for store in told.only.split(","):
                with serving(store, folder, work) as environment:
                    result["stores"][store] = measure(
                        store, listing, environment, told.repeats, told.seconds, told.warm
                    )
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for store, found in result["stores"].items():
        for name, value in found["cases"].items():
            print(
                f"{store:<11} {name:<24} {value['megabytes_per_s']:>7,.0f} MB/s  {value['cpu_s_per_gb']:.2f} CPU s/GB"
            )
        print(
            f"{store:<11} {found['ours']} against {found['best_client']}: {found['ratio']:.2f} (wanted >= {WANTED});"
            f" auto {found['ratio_auto']:.2f}, with checksums {found['ratio_checked']:.2f}"
        )
    if told.json:
        told.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(found["ratio"] >= WANTED for found in result["stores"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
