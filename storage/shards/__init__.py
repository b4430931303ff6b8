"""The latent-shard format: sibling parquet files, an index and a manifest. Knows no model and no torch."""

from isthmus.storage.shards.dataset import Dataset, open_dataset
from isthmus.storage.shards.index import Index
from isthmus.storage.shards.manifest import Manifest
from isthmus.storage.shards.spec import (
    AutoencoderSpec,
    DatasetSpec,
    EncodedText,
    EncoderSpec,
    FieldSpec,
    Sample,
    TextColumn,
)
from isthmus.storage.shards.verify import Problem, VerifyReport, stats, verify
from isthmus.storage.shards.writer import DatasetWriter, balanced_row_groups, rows_by_bytes

__all__ = [
    "AutoencoderSpec",
    "Dataset",
    "DatasetSpec",
    "DatasetWriter",
    "EncodedText",
    "EncoderSpec",
    "FieldSpec",
    "Index",
    "Manifest",
    "Problem",
    "Sample",
    "TextColumn",
    "VerifyReport",
    "balanced_row_groups",
    "open_dataset",
    "rows_by_bytes",
    "stats",
    "verify",
]
