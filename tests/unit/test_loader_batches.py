"""What the loader delivers: the right values for the right keys, in the order that the plan says."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.errors import DatasetMismatch, UsageError, WorldSizeError
from isthmus.storage.ranges import local
from isthmus.storage.shards import DatasetSpec, open_dataset
from isthmus.storage.shards.synthetic import TINY, sample, write_synthetic
from isthmus.storage.stream import Batch, Loader, Plan, Segment

SPEC = DatasetSpec(TINY.autoencoder, TINY.text, TINY.resolutions, 3, TINY.buckets)


def bucket_of(number: int) -> str:
    return "2:1" if number % 5 == 0 else "1:1"


def size_class_of(number: int) -> int:
    return 32 if number % 3 == 0 else 64


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """90 samples: two buckets, two size classes, three captions."""
    place = tmp_path_factory.mktemp("loader") / "data"
    write_synthetic(str(place), 90, SPEC, bucket_of=bucket_of, size_class_of=size_class_of)
    return open_dataset(str(place))


def plan_of(*stages: tuple[int, int]) -> Plan:
    """Stages of (steps, global batch size)."""
    plan = Plan((Segment(0, 0, 0, stages[0][1]),))
    step = 0
    for number, (steps, batch) in enumerate(stages):
        if number:
            plan = plan.append(plan.next_segment(step, stage=number, global_batch_size=batch))
        step += steps
    return plan


def make(dataset, plan=None, **options) -> Loader:
    defaults = {"seed": 3, "lanes": 4, "shuffle_window": 32, "stages": [32], "plan": plan or plan_of((1, 8))}
    return Loader([dataset], [1], **(defaults | options))


def keys(loader: Loader, steps: int) -> list[list[str]]:
    with loader:
        return [list(batch.keys) for batch in islice(loader, steps)]


def check_values(batch: Batch, resolution: int, seed: int = 0) -> None:
    """Every array of the batch against the samples as they were written."""
    for row, key in enumerate(batch.keys):
        number = int(key[1:])
        told = sample(SPEC, number, bucket=bucket_of(number), size_class=size_class_of(number), seed=seed)
        caption = told.captions.index(batch.captions[row])
        assert batch.bucket == told.bucket
        assert np.array_equal(batch.latent_mean[row], told.latents[resolution][0])
        assert np.array_equal(batch.latent_logvar[row], told.latents[resolution][1])
        for encoder, (tokens, length, pooled) in told.text[caption].items():
            column = batch.text[encoder]
            assert np.array_equal(column.tokens[row], tokens)
            assert column.length[row] == length
            assert (column.pooled is None) == (pooled is None)
            if column.pooled is not None:
                assert np.array_equal(column.pooled[row], pooled)
        assert tuple(batch.original_size[row]) == told.original_size
        assert tuple(batch.crop[row]) == told.crop
        assert batch.flipped[row] == told.flipped


def test_values_belong_to_their_keys_over_stages_and_captions(dataset):
    captions: Counter[str] = Counter()
    with make(dataset, plan_of((40, 8), (1, 4)), stages=[32, 64]) as loader:
        for batch in islice(loader, 70):
            resolution = 32 if batch.step < 40 else 64
            assert (batch.stage, len(batch)) == ((0, 8) if batch.step < 40 else (1, 4))
            assert (
                batch.latent_mean.shape[1:] == ((4, 4, 4) if batch.bucket == "1:1" else (4, 2, 4))
                or resolution == 64
            )
            assert batch.positions.tolist() == list(range(len(batch)))
            check_values(batch, resolution)
            captions.update(caption.split()[1] for caption in batch.captions)
    assert set(captions) == {"0", "1", "2"}


def test_a_stage_reads_the_size_classes_that_reach_its_resolution(dataset):
    with make(dataset, stages=[64]) as loader:
        seen = Counter(key for batch in islice(loader, 30) for key in batch.keys)
    assert set(seen) == {f"s{number}" for number in range(90) if number % 3}
    # 60 rows an epoch; 240 delivered: four times each, but for the buckets' phases.
    assert set(seen.values()) <= {3, 4, 5}


def test_ranks_share_the_global_batch_and_a_restart_goes_on(dataset):
    whole = keys(make(dataset), 40)
    ranks = [keys(make(dataset, rank=rank, world_size=4), 40) for rank in range(4)]
    assert [[key for rank in ranks for key in rank[step]] for step in range(40)] == whole
    assert keys(make(dataset, start_step=17, world_size=2, rank=1), 5) == [step[4:] for step in whole[17:22]]


def test_describe_says_where_each_sample_of_the_global_batch_is(dataset):
    with make(dataset, world_size=2) as loader:
        batch = next(islice(loader, 6, 7))
        places = loader.describe(6)
    assert [place.position for place in places] == list(range(8))
    for key, place in zip(batch.keys, places, strict=False):
        table = pq.ParquetFile(Path(dataset.uri) / place.shard).read_row_group(place.row_group)
        assert table["key"][place.row].as_py() == key
        assert f"caption {place.caption} of {key}" in batch.captions


def test_sources_are_mixed_by_their_repeats(dataset, tmp_path):
    write_synthetic(str(tmp_path / "more"), 30, SPEC, seed=5, prefix="m")
    other = open_dataset(str(tmp_path / "more"))
    options = {"seed": 0, "lanes": 2, "shuffle_window": 64, "stages": [32], "plan": plan_of((1, 6))}
    with Loader([dataset, other], [Fraction(1, 2), 2], **options) as loader:
        seen = Counter(key for batch in islice(loader, 350) for key in batch.keys)
    epochs = 350 * 6 / (45 + 60)
    assert {key[0] for key in seen} == {"s", "m"}
    assert all(abs(seen[f"m{number}"] - 2 * epochs) <= 3 for number in range(30))
    assert all(abs(seen[f"s{number}"] - epochs / 2) <= 2 for number in range(90))


def test_a_batch_stays_valid_until_the_next_but_one_is_requested_and_buffers_are_reused(dataset):
    with make(dataset, depth=2) as loader:
        places = set()
        before = next(loader)
        for batch in islice(loader, 500):
            if batch.step % 10 < 2:
                check_values(before, 32)
                check_values(batch, 32)
            places.add(batch.latent_mean.ctypes.data)
            before = batch
        assert loader.resident_bytes <= loader._capacity(before.step)
    assert len(places) < 100  # two windows' batches and some


def test_a_plan_may_be_extended_before_its_first_changed_step_is_delivered(dataset):
    plan = plan_of((1, 8))
    longer = plan.append(plan.next_segment(9, stage=0, global_batch_size=12))
    longer = longer.append(longer.next_segment(15, stage=1, global_batch_size=4))
    expected = keys(make(dataset, longer, stages=[32, 64]), 25)
    with make(dataset, plan, stages=[32, 64]) as loader:
        got = [list(batch.keys) for batch in islice(loader, 7)]
        loader.extend(longer)
        loader.extend(longer)
        got += [list(batch.keys) for batch in islice(loader, 18)]
        assert got == expected
        with pytest.raises(UsageError, match="changes step 20, but step 24 was delivered already"):
            loader.extend(longer.append(longer.next_segment(20, stage=1, global_batch_size=8)))


def test_a_skipped_range_is_never_delivered(dataset):
    plan = plan_of((1, 8))
    skipping = plan.append(plan.next_segment(4, stage=0, global_batch_size=8, skipped=[(40, 64)]))
    straight, jumped = keys(make(dataset, plan), 12), keys(make(dataset, skipping), 9)
    assert jumped[:4] == straight[:4]
    assert jumped[4:5] != []
    assert len(jumped) == 9


def test_datasets_that_do_not_fit_each_other_are_refused(dataset, tmp_path):
    from isthmus.storage.shards import EncoderSpec

    other = DatasetSpec(TINY.autoencoder, (EncoderSpec("clip_l", 4, 6, 5, "another"),), (32, 64), 1, ("1:1",))
    write_synthetic(str(tmp_path / "other"), 8, other)
    options = {"seed": 0, "lanes": 2, "shuffle_window": 64, "stages": [32], "plan": plan_of((1, 6))}
    with pytest.raises(DatasetMismatch, match="made with other encoders than"):
        Loader([dataset, open_dataset(str(tmp_path / "other"))], [1, 1], **options)
    with pytest.raises(DatasetMismatch, match="stage 0 reads 128 px, the dataset holds 32 px, 64 px"):
        make(dataset, stages=[128])


def test_world_sizes_and_batches_that_do_not_fit_are_refused(dataset):
    with pytest.raises(WorldSizeError, match="world sizes that do: 1, 2, 4"):
        make(dataset, world_size=3)
    with pytest.raises(UsageError, match=r"global_batch_size 6 is not divisible by data\.lanes 4"):
        make(dataset, plan_of((1, 6)))


def test_an_order_that_needs_more_memory_is_refused_with_the_arithmetic_and_a_change_that_works(dataset):
    with make(dataset) as loader:
        need = loader.memory_bytes()
        assert loader.memory_bytes(4) < need
        with pytest.raises(UsageError) as raised:
            make(dataset, memory_limit=need - 1)
        message = str(raised.value)
        for part in (
            "stage 0 needs",
            "4 lanes x (",
            "rows of the window + ",
            " of a block and two steps)",
            "raise data.memory_limit to",
        ):
            assert part in message
        assert "use 2 or more ranks" in message
        window = int(message.split("lower data.shuffle_window to ")[1].split(",")[0])
    with pytest.raises(UsageError, match="needs"):
        make(dataset, memory_limit=need - 1, shuffle_window=window + 1)
    make(dataset, memory_limit=need - 1, shuffle_window=window).close()
    # At the limit itself it delivers the same batches, and holds no more than it said.
    with make(dataset, memory_limit=need) as tight, make(dataset) as roomy:
        for a, b in islice(zip(tight, roomy, strict=True), 60):
            assert a.keys == b.keys
            assert tight.resident_bytes <= need


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_the_settings_it_delivers_what_describe_says(dataset, data):
    """Lanes, ranks, windows, threads, tight memory, stages, batch sizes, and plans extended on the way."""
    key_at = {}
    for block in range(len(dataset.index)):
        name, row_group = dataset.index.file(block, "text"), int(dataset.index.row_group[block])
        table = pq.ParquetFile(Path(dataset.uri) / name).read_row_group(row_group)
        for row, key in enumerate(table["key"].to_pylist()):
            key_at[name.split(".")[0], row_group, row] = key
    lanes = data.draw(st.sampled_from([1, 2, 4, 6]))
    world_size = data.draw(st.sampled_from([size for size in (1, 2, 3, 6) if lanes % size == 0]))
    batches = st.integers(1, 6).map(lambda per_lane: per_lane * lanes)
    plan = plan_of((1, data.draw(batches)))
    for step in sorted(data.draw(st.sets(st.integers(1, 30), max_size=3))):
        stage = min(1, plan.timeline[-1].stage + data.draw(st.integers(0, 1)))
        plan = plan.append(plan.next_segment(step, stage=stage, global_batch_size=data.draw(batches)))
    options = {
        "seed": data.draw(st.integers(0, 9)),
        "lanes": lanes,
        "shuffle_window": data.draw(st.integers(1, 200)),
        "stages": [32, 64],
        "rank": data.draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
        "depth": data.draw(st.sampled_from([None, 1, 2, 5])),
        "check": data.draw(st.booleans()),
        "start_step": data.draw(st.integers(0, 30)),
        "wait_limit": 20.0,
    }
    loader = make(dataset, plan, **options)
    loader.close()
    if data.draw(st.booleans()):
        options["memory_limit"] = 2 * loader.memory_bytes()
    apart = data.draw(st.sampled_from([local.APART, frozenset()]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "APART", apart)  # without: as on a mount
        loader = make(dataset, plan, **options)
    with loader:
        for batch in islice(loader, 25):
            places = loader.describe(batch.step)
            share = len(places) // world_size
            mine = places[options["rank"] * share : (options["rank"] + 1) * share]
            assert batch.keys == [key_at[p.shard.split(".")[0], p.row_group, p.row] for p in mine]
            if batch.step % 10 == 7:
                last = plan.timeline[-1]
                first = max(batch.step + data.draw(st.integers(1, 4)), last.first_step + 1)
                more = plan.next_segment(first, stage=last.stage, global_batch_size=lanes)
                plan = plan.append(more)
                loader.extend(plan)
