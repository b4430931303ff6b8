"""`data index`, `stats`, `verify --sample`, `repack`, `filter` and `split` on a dataset of ten million rows.

The rows are as small as can be (a key, a caption, eight bytes of text embedding and eight of latent), the files and row groups
as many as of full-size rows: 64 rows a row group, 70 row groups a file, as SDXL at 256 pixels has. Indexing, planning and
checking take time and memory by rows, row groups and files; what they do not touch is left out.

    python large_dataset.py [--rows N] [--folder DIR] [--looking | --fields] [--json]

With --fields every row has a score, a licence and a perceptual hash: `stats`, `filter` by them and `duplicates` are measured.

Each command is a process of its own: minutes, and the most memory that it held. About 2 GB of disk, removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROWS_PER_GROUP, GROUPS = 64, 70
MAP = """\
about: ten million rows of next to nothing
autoencoder: {kind: diffusers, latent_channels: 4, factor: 8, scaling_factor: 0.13025}
text:
  clip: {max_tokens: 1, width: 4}
bucket: "1:1"
null_text: zeros
columns:
  key: id
  captions: [{caption: text, clip: {tokens: tokens}}]
  latents: {8: {mean: latent}}
"""


FIELDS = "  fields: {aesthetic: number, licence: text, phash: text, phash_colours: text}\n"


def fields_of(count: int, random: Any) -> dict[str, Any]:
    """A score, a licence and a hash a row, some nulls; one picture in a thousand is there twice."""
    import numpy as np
    import pyarrow as pa

    scores = random.normal(5, 1, count)
    bits = random.integers(0, 256, (count, 8), np.uint8)
    bits[1::1000] = bits[:-1:1000][: len(bits[1::1000])]
    licences = np.array(["cc0", "cc-by-4.0", "cc-by-sa-4.0", "unsplash"])[random.integers(0, 4, count)]
    return {
        "aesthetic": pa.array(scores, mask=random.random(count) < 0.1),
        "licence": pa.array(licences, mask=random.random(count) < 0.05),
        "phash": pa.array([row.tobytes().hex() for row in bits]),
        "phash_colours": pa.array(["80" * 12] * count),
    }


def write_files(folder: Path, rows: int, fields: bool) -> int:
    """Parquet files as another tool writes them. Returns their bytes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    per_file = ROWS_PER_GROUP * GROUPS
    size = 0
    for number, first in enumerate(range(0, rows, per_file)):
        count = min(per_file, rows - first)
        # Exponents below those of infinity and NaN.
        arrays = random.integers(0, 1 << 16, (2, count, 4), np.uint16) & np.uint16(0xBBFF)
        table = pa.table(
            {
                "id": pa.array(np.arange(first, first + count)),
                "text": pa.array([f"picture {at}" for at in range(first, first + count)]),
                "tokens": pa.array([row.tobytes() for row in arrays[0]], pa.binary(8)),
                "latent": pa.array([row.tobytes() for row in arrays[1]], pa.binary(8)),
                **(fields_of(count, random) if fields else {}),
            }
        )
        path = folder / f"{number:05d}.parquet"
        pq.write_table(table, path, row_group_size=ROWS_PER_GROUP, compression="none", use_dictionary=False)
        size += path.stat().st_size
    return size


def _apart(folder: Path, rows: int, fields: bool) -> int:
    """The same in a process of its own: what this one held would count as a child's peak."""
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(write_files, folder, rows, fields).result()


def measured(*arguments: str) -> dict[str, Any]:
    """An `isthmus data` command: seconds, peak memory in MB, and what it printed last."""
    command = [sys.executable, "-m", "isthmus", "data", *arguments]
    started = time.monotonic()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        printed = out.read().decode(errors="replace")
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}: {printed[-2000:]}")
    return {
        "command": arguments[0] if "--sample" not in arguments else "verify --sample",
        "seconds": round(time.monotonic() - started, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mb": round(usage.ru_maxrss / 1024),
        "said": printed.strip().splitlines()[-1][:160] if printed.strip() else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--folder", help="where the files go; a temporary folder if not told")
    parser.add_argument(
        "--looking", action="store_true", help="index, stats and verify --sample alone: a minute"
    )
    parser.add_argument(
        "--fields", action="store_true", help="rows with scores, licences and hashes: what they cost"
    )
    parser.add_argument("--json", action="store_true")
    told = parser.parse_args()
    # An end by SIGTERM removes the files, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    work = Path(tempfile.mkdtemp(prefix="isthmus-large-", dir=told.folder))
    try:
        found = run(work, told.rows, looking=told.looking, fields=told.fields, say=not told.json)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if told.json:
        print(json.dumps(found, indent=2))


def run(work: Path, rows: int, *, looking: bool, fields: bool, say: bool) -> dict[str, Any]:
    """All commands, one after the other."""
    started = time.monotonic()
    size = _apart(work / "theirs", rows, fields)
    files = -(-rows // (ROWS_PER_GROUP * GROUPS))
    blocks = -(-rows // ROWS_PER_GROUP)
    if say:
        print(f"{rows} rows, {blocks} row groups, {files} files, {size / 1e6:.0f} MB, "
              f"written in {time.monotonic() - started:.0f} s")  # fmt: skip
        print(f"{'command':<28}{'minutes':>9}{'CPU min':>9}{'peak MB':>9}")
    (work / "map.yaml").write_text(MAP + (FIELDS if fields else ""))
    theirs, index, ours = (str(work / name) for name in ("theirs", "index", "ours"))
    foreign = [index, theirs]
    commands = [
        ("index", ["index", theirs, "--columns", str(work / "map.yaml"), "--dest", index]),
        ("stats, indexed files", ["stats", *foreign]),
        ("verify --sample, indexed", ["verify", *foreign, "--sample", "10000"]),
        ("repack to our layout", ["repack", *foreign, ours]),
        ("stats", ["stats", ours]),
        ("verify --sample", ["verify", ours, "--sample", "10000"]),
        ("filter 1 in 100", ["filter", ours, str(work / "some"), "--where", "caption like '%00'"]),
        ("split 99 : 1", ["split", ours, str(work / "parts"), "--parts", "train=0.99,val=0.01"]),
        ("merge of the parts", ["merge", f"{work}/parts/train", f"{work}/parts/val", str(work / "all")]),
    ]
    if looking:
        commands = commands[:3]
    if fields:
        where = "aesthetic >= 7.5 and licence in ('cc0', 'cc-by-4.0')"
        commands = [
            *(one for one in commands if one[0] in ("index", "repack to our layout", "stats")),
            ("duplicates", ["duplicates", ours]),
            ("filter 1 in 350", ["filter", ours, str(work / "some"), "--where", where]),
        ]
    results = []
    for name, arguments in commands:
        one = {"name": name, **measured(*arguments)}
        results.append(one)
        if say:
            print(
                f"{name:<28}{one['seconds'] / 60:>9.2f}{one['cpu_seconds'] / 60:>9.2f}{one['peak_mb']:>9}",
                flush=True,
            )
        if name.startswith("repack"):
            shutil.rmtree(theirs)
        if name.startswith("filter"):
            shutil.rmtree(work / "some")
        if name.startswith("split"):
            shutil.rmtree(ours)
    return {"rows": rows, "row_groups": blocks, "files": files, "bytes": size, "commands": results}


if __name__ == "__main__":
    main()
