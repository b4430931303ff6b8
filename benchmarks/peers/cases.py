"""The table of cases: who is compared, on which files, in which environment, and how each shuffles."""

from __future__ import annotations

from dataclasses import dataclass

ENVIRONMENTS: dict[str, tuple[str, ...]] = {
    "mds": ("mosaicml-streaming==0.13.0",),
    "lit": ("litdata==0.2.76", "pyarrow>=26", "polars>=2.1"),
    "wds": ("webdataset==1.0.2",),
    "hf": ("datasets==5.2.0", "torchdata==0.11.0", "requests", "aiohttp"),
    "clients": ("obstore", "s3fs", "boto3", "aiohttp", "numpy"),
    "chart": ("matplotlib",),
}
"""What is installed in each environment, besides this environment's torch where it is needed."""


@dataclass(frozen=True, slots=True)
class Data:
    """Files that some cases read."""

    module: str
    """That writes them."""
    case: str
    """What the module's `make` is told."""


DATA = {
    "ours": Data("ours", "ours"),
    "mds": Data("mds", "mds"),
    "litdata": Data("lit", "chunks"),
    "parquet": Data("lit", "parquet"),
    "webdataset": Data("wds", "tar"),
    "arrow": Data("hf", "arrow"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One reader."""

    title: str
    module: str
    """In `peers`; its environment too, unless it runs in ours."""
    data: str
    shuffle: str
    """What its shuffle is."""
    workers: tuple[int, ...] = (0, 1, 2)
    counted: bool = False
    """A peer that shuffles rows and yields torch batches."""
    epochs: bool = True
    """Ends after an epoch; otherwise it reads as long as it is asked to."""

    @property
    def environment(self) -> str | None:
        """Name in ENVIRONMENTS; None is the environment that runs this."""
        return self.module if self.module in ENVIRONMENTS else None


_WINDOWS = "rows in windows of 1,024 over 8 lanes, blocks over the epoch"
CASES = {
    "readinto": Case("plain readinto, reused buffer", "plain", "ours", "none", (0,), epochs=False),
    "readinto_window": Case(
        "plain readinto, 16 buffers in turn", "plain", "ours", "none", (0,), epochs=False
    ),
    "ours": Case("isthmus", "ours", "ours", _WINDOWS, (0,), epochs=False),
    "ours_checked": Case("isthmus, checksums on", "ours", "ours", _WINDOWS, (0,), epochs=False),
    "by_hand": Case("torch Dataset by hand, our files", "plain", "ours", "row groups, rows within one"),
    "mds": Case(
        "MosaicML streaming, MDS", "mds", "mds", "py1e: shards, rows in spans of shards", counted=True
    ),
    "litdata": Case("litData, own chunks", "lit", "litdata", "chunks, rows within one", counted=True),
    "litdata_parquet": Case("litData, parquet", "lit", "parquet", "files, rows within one", counted=True),
    "hf_parquet": Case(
        "HF datasets, parquet", "hf", "parquet", "files, rows in a buffer of 1,024", counted=True
    ),
    "webdataset": Case("webdataset", "wds", "webdataset", "tars, rows in a buffer of 1,024", counted=True),
    "hf_arrow": Case("HF datasets, Arrow", "hf", "arrow", "rows over the epoch (memory map)", counted=True),
    "hf_arrow_tables": Case(
        "HF Arrow tables, to torch by hand", "hf", "arrow", "rows over the epoch (memory map)"
    ),
    "hf_arrow_in_order": Case("HF Arrow tables, no row shuffle", "hf", "arrow", "none", (0,)),
}
