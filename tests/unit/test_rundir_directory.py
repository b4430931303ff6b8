"""The run directory: layout, order, atomicity, and what happens when the store refuses."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.errors import LeaseLost, RunExists, RunNotFound, StorageError
from isthmus.storage.rundir import RunDirectory


@pytest.fixture(params=["file", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDirectory:
    """A run directory on each kind of store."""
    return RunDirectory(
        tmp_path / "runs" / "a" if request.param == "file" else f"memory://{uuid.uuid4().hex}/a"
    )


def test_a_new_one_is_nothing_until_created(run: RunDirectory) -> None:
    assert not run.exists()
    assert run.events() == []
    assert run.segments() == []
    assert run.checkpoints() == []
    assert run.read_metrics("train") == []
    assert run.lease_token() is None
    with pytest.raises(RunNotFound):
        run.read_run_json()
    with pytest.raises(RunNotFound):
        RunDirectory.open(run.uri)


def test_create_then_open_again_with_the_same_recipe(run: RunDirectory) -> None:
    run.create("name: a\n", {"id": "a", "recipe_hash": "1"})
    run.create("name: a\n", {"id": "a", "recipe_hash": "1"})
    assert RunDirectory.open(run.uri).read_recipe() == "name: a\n"


def test_another_recipe_is_refused_and_changes_nothing(run: RunDirectory) -> None:
    run.create("name: a\n", {"id": "a", "recipe_hash": "1"})
    with pytest.raises(RunExists, match="another recipe"):
        run.create("name: b\n", {"id": "b", "recipe_hash": "2"})
    assert run.read_recipe() == "name: a\n"
    assert run.read_run_json() == {"id": "a", "recipe_hash": "1"}


def test_update_run_json_merges_dictionaries(run: RunDirectory) -> None:
    run.create("", {"id": "a", "recipe_hash": "1", "packages": {"isthmus": "0.1"}})
    run.update_run_json(packages={"torch": "2"}, attempts=1)
    assert run.read_run_json()["packages"] == {"isthmus": "0.1", "torch": "2"}
    assert run.read_run_json()["attempts"] == 1


def test_events_keep_their_order_when_a_clock_goes_back(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([1000.0, 400.0, 400.0])
    monkeypatch.setattr("isthmus.storage.rundir.directory.time.time", lambda: next(clock))
    run.event("started", attempt=1)
    run.event("stop-requested", by="user")
    run.event("failed", cause="x")
    assert [event["type"] for event in run.events()] == ["started", "stop-requested", "failed"]
    assert run.events("stop-requested")[0]["by"] == "user"


def test_an_unknown_event_type_is_a_bug(run: RunDirectory) -> None:
    with pytest.raises(ValueError, match="stop-requested"):
        run.event("stopping")


def test_segments_append_once(run: RunDirectory) -> None:
    assert run.append_segment({"stage": 0, "first_step": 0}) == 1
    assert run.append_segment({"stage": 0, "first_step": 0}) == 1
    assert run.append_segment({"stage": 1, "first_step": 5}) == 2
    assert [segment["stage"] for segment in run.segments()] == [0, 1]


def test_a_segment_of_another_attempt_is_not_overwritten(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.append_segment({"stage": 0})
    monkeypatch.setattr(RunDirectory, "_numbered", lambda self, folder: [])
    with pytest.raises(LeaseLost, match="another attempt"):
        run.append_segment({"stage": 7})


def test_metrics_keep_the_last_attempt_of_a_step(run: RunDirectory) -> None:
    with run.metrics("train", writer="attempt1") as writer:
        for step in range(4):
            writer.write({"step": step, "attempt": 1, "loss": 1.0})
    with run.metrics("train", writer="attempt2") as writer:
        for step in range(2, 5):
            writer.write({"step": step, "attempt": 2, "loss": 2.0})
    rows = run.read_metrics("train")
    assert [(row["step"], row["attempt"]) for row in rows] == [(0, 1), (1, 1), (2, 2), (3, 2), (4, 2)]
    assert all("time" in row for row in rows)
    assert len(run.read_metrics("train", all_attempts=True)) == 7
    assert run.metric_kinds() == ["train"]


def test_flush_makes_rows_visible(run: RunDirectory) -> None:
    writer = run.metrics("system-node0")
    writer.write({"cpu_percent": 3.0})
    writer.flush()
    assert [row["cpu_percent"] for row in run.read_metrics("system-node0")] == [3.0]
    writer.write({"cpu_percent": 4.0})
    writer.close()
    assert len(run.read_metrics("system-node0")) == 2


def test_a_part_appears_by_age_on_an_object_store() -> None:
    run = RunDirectory(f"memory://{uuid.uuid4().hex}/a")
    writer = run.metrics("train", part_seconds=0.0)
    writer.write({"step": 1})
    assert len(run.read_metrics("train")) == 1


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with run.metrics("train") as writer:
        writer.write({"step": 1})
        writer.write({"step": 2})
    (part,) = (tmp_path / "metrics" / "train").iterdir()
    part.write_bytes(part.read_bytes()[:-4])
    assert [row["step"] for row in run.read_metrics("train")] == [1]


@pytest.mark.faults
def test_kill_9_loses_at_most_the_line_being_written(tmp_path: Path) -> None:
    program = (
        "import sys; from isthmus.storage.rundir import RunDirectory\n"
        "writer = RunDirectory(sys.argv[1]).metrics('train')\n"
        "step = 0\n"
        "while True:\n"
        "    writer.write({'step': step}); step += 1\n"
        "    if step == 500: print('go', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    steps = [row["step"] for row in RunDirectory(tmp_path).read_metrics("train")]
    assert len(steps) >= 500
    assert steps == list(range(len(steps)))


def test_checkpoints_count_once_committed(run: RunDirectory) -> None:
    run.write_file("checkpoints/step-00000010/model.bin", b"x")
    assert run.checkpoints() == []
    run.commit_checkpoint(10, {"files": {}})
    run.commit_checkpoint(2, {"files": {}})
    assert run.checkpoints() == [2, 10]
    assert run.read_commit(10) == {"files": {}}
    run.remove_checkpoint(10)
    assert run.checkpoints() == [2]
    assert run.read_file("checkpoints/step-00000010/model.bin") is None
    with pytest.raises(RunNotFound):
        run.read_commit(10)


def test_places(run: RunDirectory) -> None:
    assert run.checkpoint_uri(7).endswith("/a/checkpoints/step-00000007")
    assert run.export_uri().endswith("/a/export")
    assert run.report_uri().endswith("/a/report.html")
    run.write_file("samples/step-00000007.png", b"png")
    assert run.samples() == [(7, run.samples_uri(7))]


def test_small_objects_are_never_seen_half_written(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create("", {"id": "a", "recipe_hash": "1"})
    program = (
        "import sys; from isthmus.storage.rundir import RunDirectory\n"
        "run = RunDirectory(sys.argv[1]); print('go', flush=True)\n"
        "for n in range(200): run.write_run_json({'id': 'a', 'n': n, 'filler': 'x' * 20000 * (n % 3)})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    while process.poll() is None:
        run.read_run_json()
    assert process.returncode == 0
    assert run.read_run_json()["n"] == 199
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml", "run.json"]


def test_conditional_create_has_one_winner_among_processes(tmp_path: Path) -> None:
    program = (
        "import sys; from isthmus.storage.rundir.store import open_store\n"
        "store = open_store(sys.argv[1]); sys.stdin.readline()\n"
        "print(sum(store.create(f'x/{n}', sys.argv[2].encode()) for n in range(100)))\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(n)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for n in range(3)
    ]  # fmt: skip
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert sum(int(process.communicate()[0]) for process in processes) == 100


def test_a_damaged_object_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "run.json").write_text('{"id": ')
    with pytest.raises(StorageError, match=r"run\.json"):
        run.read_run_json()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=False)


@pytest.mark.root
@pytest.mark.faults
def test_a_full_disk_is_one_line_and_damages_nothing(small_disk: Path) -> None:
    run = RunDirectory(small_disk / "a").create("name: a\n", {"id": "a", "recipe_hash": "1"})
    writer = run.metrics("train")
    filler = small_disk / "filler"
    writer.write({"step": 0})
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)
    with pytest.raises(StorageError, match=r"run\.json: cannot write: the disk is full") as caught:
        run.write_run_json({"id": "a", "filler": "x" * 100_000})
    assert "\n" not in str(caught.value)
    assert run.read_run_json() == {"id": "a", "recipe_hash": "1"}

    def write_until_refused() -> None:
        for step in range(1, 3000):
            writer.write({"step": step})

    with pytest.raises(StorageError, match="the disk is full"):
        write_until_refused()
    filler.unlink()
    writer.write({"step": 9999})
    writer.close()
    steps = [row["step"] for row in run.read_metrics("train")]
    assert steps == [*range(len(steps) - 1), 9999]


@pytest.mark.root
def test_a_read_only_place_is_one_line(small_disk: Path) -> None:
    (small_disk / "a").mkdir()
    remounted = subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=False)
    if remounted.returncode:
        pytest.skip("cannot remount here")
    run = RunDirectory(small_disk / "a")
    for write in (lambda: run.create("", {"id": "a"}), lambda: run.metrics("train").write({"step": 1})):
        with pytest.raises(StorageError, match="read-only") as caught:
            write()
        assert str(small_disk) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_file_in_the_way_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a part of the path is a file"):
        RunDirectory(tmp_path / "file" / "a").create("", {"id": "a"})


def test_numpy_scalars_are_numbers(run: RunDirectory) -> None:
    np = pytest.importorskip("numpy")
    with run.metrics("train") as writer:
        writer.write({"step": np.int64(3), "loss": np.float32(0.5)})
    assert run.read_metrics("train")[0]["loss"] == 0.5
    assert json.loads(json.dumps(run.event("note", step=3)))["step"] == 3
