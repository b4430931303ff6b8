"""Datasets that become one, and those that cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rewriting
from rewriting import SPEC, rows_of

from isthmus.errors import DatasetMismatch, DatasetNotFound, UsageError
from isthmus.storage.shards import DatasetWriter, open_dataset, verify
from isthmus.storage.shards.rewrite import Options, merge
from isthmus.storage.shards.rewrite_plan import Sizes
from isthmus.storage.shards.spec import AutoencoderSpec, EncoderSpec
from isthmus.storage.shards.synthetic import random_text, sample


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 samples of two buckets, two size classes and two captions; an autoencoder beside them, two rejected pictures."""
    folder = rewriting.write(tmp_path_factory.mktemp("rewrite") / "data")
    (folder / "autoencoder").mkdir()
    (folder / "autoencoder" / "autoencoder.safetensors").write_bytes(b"weights")
    (folder / "autoencoder" / "config.json").write_bytes(b"{}")
    return folder


def options(*, order: Any = "bucket", threads: int = 2, restart: bool = False, **sizes: int) -> Options:
    return Options(Sizes(**sizes), order, threads, restart)


def check(folder: Path) -> None:
    report = verify(str(folder))
    assert report.ok, report.problems


def test_merged_datasets_hold_the_rows_of_all(data, tmp_path):
    other = rewriting.write(tmp_path / "other", 30, prefix="t", seed=5, prompts=("a blue square", "a cat"))
    merge([str(data), str(other)], str(tmp_path / "out"), options(group_rows=8))
    check(tmp_path / "out")
    assert rows_of(tmp_path / "out") == {**rows_of(data), **rows_of(other)}
    merged = open_dataset(str(tmp_path / "out"))
    assert merged.prompts == ["a red heart", "a blue square", "a cat"]
    mine, theirs = open_dataset(str(data)), open_dataset(str(other))
    for encoder in ("clip_l", "t5"):
        tokens = merged.prompt_text[encoder].tokens
        assert (tokens[:2] == mine.prompt_text[encoder].tokens).all()
        assert (tokens[2] == theirs.prompt_text[encoder].tokens[1]).all()
    assert (tmp_path / "out" / "autoencoder" / "config.json").read_bytes() == b"{}"


def test_a_dataset_of_fewer_resolutions_joins_one_of_more(tmp_path):
    small = spec_of(resolutions=(32,))
    a = rewriting.write(
        tmp_path / "a", 10, spec=small, size_class_of=lambda number: 32, prefix="a", bucket_of=lambda n: "1:1"
    )
    b = rewriting.write(tmp_path / "b", 10, prefix="b")
    merge([str(a), str(b)], str(tmp_path / "out"), options())
    check(tmp_path / "out")
    assert open_dataset(str(tmp_path / "out")).spec.resolutions == (32, 64)
    assert rows_of(tmp_path / "out") == {**rows_of(a), **rows_of(b)}
    large = rewriting.write(
        tmp_path / "large", 10, spec=spec_of(resolutions=(64,)), size_class_of=lambda number: 64, prefix="c"
    )
    with pytest.raises(DatasetMismatch, match=r"of 64 px have no latents at \[32\] px"):
        merge([str(b), str(large)], str(tmp_path / "no"), options())


def spec_of(**changes: Any) -> Any:
    return replace(SPEC, **changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"autoencoder": AutoencoderSpec("patch_pca", "other", 4, 8, 0.5, 0.0)}, "autoencoder.fingerprint is other, not"),
        ({"autoencoder": AutoencoderSpec("patch_pca", "synthetic", 4, 8, 0.25, 0.0)}, "scaling_factor is 0.25, not 0.5"),
        ({"text": (EncoderSpec("clip_l", 4, 6, 5, "other"), SPEC.text[1])}, "clip_l.fingerprint is other"),
        ({"text": (EncoderSpec("clip_l", 5, 6, 5, "synthetic"), SPEC.text[1])}, "clip_l.max_tokens is 5, not 4"),
        ({"text": SPEC.text[:1]}, "no text encoder t5"),
        ({"text": (*SPEC.text, EncoderSpec("gemma", 2, 4, None, "x"))}, "another text encoder, gemma"),
        ({"captions": 1}, "1 captions a sample, not 2"),
    ],
)  # fmt: skip
def test_datasets_of_other_encoders_are_not_merged(data, tmp_path, changes, said):
    other = rewriting.write(tmp_path / "other", 4, spec=spec_of(**changes), prefix="t")
    with pytest.raises(DatasetMismatch, match=said) as refused:
        merge([str(data), str(other)], str(tmp_path / "out"), options())
    assert refused.value.exit_code == 2
    assert not (tmp_path / "out").exists()


def test_another_null_embedding_is_refused_and_another_rounding_is_not(data, tmp_path):
    for name, by in (("rounded", np.float16(1.001)), ("other", np.float16(0.5))):
        null = random_text(SPEC, 1)
        null["t5"].tokens = null["t5"].tokens * by
        with DatasetWriter(str(tmp_path / name), SPEC) as writer:
            writer.add(sample(SPEC, 1, prefix=name))
            writer.finish(null)
    merge([str(data), str(tmp_path / "rounded")], str(tmp_path / "out"), options())
    assert (tmp_path / "out" / "_null.parquet").read_bytes() == (data / "_null.parquet").read_bytes()
    with pytest.raises(DatasetMismatch, match="null embedding of t5 is another one"):
        merge([str(data), str(tmp_path / "other")], str(tmp_path / "no"), options())


def test_a_bucket_of_another_shape_is_refused(tmp_path):
    a = rewriting.write(tmp_path / "a", 4, bucket_of=lambda n: "2:1")
    spec = spec_of(buckets=("2:1",))
    with DatasetWriter(str(tmp_path / "b"), spec) as writer:
        one = sample(spec, 1, bucket="2:1", prefix="t")
        one.latents = {r: (m[:, :, ::2].copy(), v[:, :, ::2].copy()) for r, (m, v) in one.latents.items()}
        writer.add(one)
        writer.finish(random_text(spec, 1))
    with pytest.raises(DatasetMismatch, match="bucket 2:1 at 32 px is"):
        merge([str(a), str(tmp_path / "b")], str(tmp_path / "out"), options())


def test_duplicate_keys_are_refused_or_the_later_ones_left_out(data, tmp_path):
    other = rewriting.write(tmp_path / "other", 70, seed=9)
    with pytest.raises(UsageError, match=r"60 keys come a second time: '.*' in .*other") as refused:
        merge([str(data), str(other)], str(tmp_path / "out"), options())
    assert "--duplicates skip" in (refused.value.hint or "")
    done = merge([str(data), str(other)], str(tmp_path / "out"), options(), duplicates="skip")
    assert done.left_out == 60
    found, first, second = rows_of(tmp_path / "out"), rows_of(data), rows_of(other)
    assert len(found) == 70
    assert all(row == first.get(key, second[key]) for key, row in found.items())
    check(tmp_path / "out")


def test_what_is_not_merged(data, tmp_path):
    with pytest.raises(UsageError, match="at least two"):
        merge([str(data)], str(tmp_path / "out"))
    with pytest.raises(UsageError, match="named twice"):
        merge([str(data), f"{data}/"], str(tmp_path / "out"))
    with pytest.raises(DatasetNotFound):
        merge([str(data), str(tmp_path / "nothing")], str(tmp_path / "out"))
