"""What is said of an encode job afterwards and in between: its page, and what it has cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pages import Page

from isthmus.cli.app import main
from isthmus.core.recipe.dump import dump_recipe, recipe_data, recipe_hash
from isthmus.core.report import write_report
from isthmus.errors import UsageError
from isthmus.storage.rundir import RunDirectory

BEGUN = 1_700_000_000.0


def encode_run(
    folder: Path, *, finished: bool, usd_per_hour: float | None = 36.0, rows: int = 40
) -> RunDirectory:
    """Two attempts of an hour each, with half an hour between them; 1,000 of 4,000 pictures in the first."""
    from isthmus.cli.encode_job import job_recipe

    section = {"source": {"local": "/pictures", "azure": "az://c@a/x"}, "dest": "/latents"}
    words = ["compute={gpu: a100-80gb, nodes: 1, gpus_per_node: 8}"]
    recipe = job_recipe("quickstart", words, section, nodes=None, here=None).recipe
    run = RunDirectory(folder / "enc-1")
    facts: dict[str, Any] = {
        "id": "enc-1",
        "name": recipe.name,
        "backend": "local",
        "created": BEGUN,
        "world_size": 8,
    }
    facts |= {
        "recipe": recipe_data(recipe),
        "recipe_hash": recipe_hash(recipe),
        "job_ids": ["enc-1"],
        "native": {},
    }
    run.create(dump_recipe(recipe), facts)
    for attempt, (start, end, kind) in enumerate(((0, 3600, "preempted"), (5400, 9000, "finished")), 1):
        run.event_once(run.next_event("submitted", BEGUN + start - 1), {"job_id": "enc-1"})
        run.event_once(run.next_event("started", BEGUN + start), {"attempt": attempt})
        with run.metrics("encode", writer=f"attempt{attempt}") as writer:
            for at in range(rows):
                done = 1000 * (attempt - 1) + 1000 * (at + 1) // rows
                hours = attempt - 1 + (at + 1) / rows
                writer.write(
                    {
                        "time": BEGUN + start + 3600 * (at + 1) / rows, "attempt": attempt, "pictures": done,
                        "expected": 4000, "written": done - 5, "rejected": 5, "images_per_s": 0.5, "seconds_left": 3600.0,
                        "hours": hours, "usd": None if usd_per_hour is None else hours * usd_per_hour,
                    }
                )  # fmt: skip
            if finished and attempt == 2:
                last = {
                    "pictures": 4000,
                    "expected": 4000,
                    "written": 3988,
                    "rejected": 12,
                    "images_per_s": 0.6,
                }
                reasons = {"unreadable": 9, "<b>filter-size": 3}
                writer.write(
                    {"time": BEGUN + end, "attempt": 2, "hours": 2.0, "usd": 72.0, "reasons": reasons, **last}
                )
        if attempt == 1 or finished:
            run.event_once(run.next_event(kind, BEGUN + end), {"attempt": attempt})
    return run


def test_the_page_of_an_encode_job_tells_of_pictures(tmp_path: Path) -> None:
    run = encode_run(tmp_path, finished=True)
    page = Page(Path(write_report(run.uri)).read_text(encoding="utf-8"))
    for told in (
        "Encoding",
        "Pictures done",
        "4,000",
        "all of the source's",
        "images/s, recent median",
        "$72.00",
        "/pictures",
    ):
        assert told in page.text, told
    assert "unreadable" in page.text
    assert "<b>filter-size" in page.text  # as text
    for training in ("No step has been recorded", "Samples", "Checkpoints", "Loss", "Validation"):
        assert training not in page.text, training
    assert len(page.all("svg")) == 3
    assert "from picture" in page.text
    assert "over 2 attempts" in page.text
    assert "az://" not in page.text.split("recipe.yaml")[0]


def test_the_page_of_one_that_runs_or_has_only_begun(tmp_path: Path) -> None:
    page = Page(Path(write_report(encode_run(tmp_path, finished=False, usd_per_hour=None).uri)).read_text())
    for told in ("2,000", "of about 4,000", "Time left", ", of this attempt"):
        assert told in page.text, told
    assert "Cost" not in page.text
    page = Page(Path(write_report(encode_run(tmp_path / "new", finished=False, rows=0).uri)).read_text())
    assert "No picture has been counted yet." in page.text


def cost(run: RunDirectory, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["cost", "run", run.uri, "--offline", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def put_down(run: RunDirectory, usd_per_hour: float | None) -> None:
    """What the launch recorded of its submission and its estimate."""
    offer = {"region": "us-east-1", "tier": "on_demand", "sku": "ml.p4de.24xlarge"}
    rendered = {
        "job_id": "enc-1",
        "backend": "sagemaker",
        "run_id": "enc-1",
        "run_uri": run.uri,
        "request": {},
        "files": {},
    }
    run.write_file(
        "submissions/0001.json",
        json.dumps(
            {
                "number": 1, "created": BEGUN, "rendered": rendered, "runs_on": offer,
                "destination": {"backend": "sagemaker", "offer": offer}, "usd_per_hour": usd_per_hour, "token": "t",
            }
        ).encode(),
    )  # fmt: skip
    kept = {"usd": 100.0, "usd_interval": [50.0, 200.0], "hours": 3.0, "pictures": 4000}
    run.write_file("estimate.json", json.dumps(kept).encode())


@pytest.mark.usefixtures("state")
def test_cost_run_says_pictures_and_their_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = encode_run(tmp_path, finished=True)
    put_down(run, 36.0)
    code, out, err = cost(run, capsys)
    assert (code, err) == (0, "")
    first, *lines = out.splitlines()
    assert first == "enc-1: $72.00, 2 h, 4,000 pictures of about 4,000 (100%), 0.6 images/s"
    assert "step" not in out
    assert "the rest" not in out
    assert lines[-1] == "  estimate at launch: $100 ($50.00 to $200), 3 h"
    told = json.loads(cost(run, capsys, "--json")[1])
    assert (told["pictures"], told["expected"], told["rest"]["hours"]) == (4000, 4000, 0.0)
    assert "step" not in told


@pytest.mark.usefixtures("state")
def test_the_rest_of_an_encoding_is_told_by_its_own_pace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = encode_run(tmp_path, finished=False)
    put_down(run, 36.0)
    run.event_once(run.next_event("preempted", BEGUN + 9000), {"attempt": 2})
    told = json.loads(cost(run, capsys, "--json")[1])
    assert (told["pictures"], told["rest"]["pictures"]) == (2000, 2000)
    assert told["rest"]["hours"] == pytest.approx(2.0)
    assert told["rest"]["usd"] == pytest.approx(72.0)
    assert told["rest"]["basis"] == "its own pace"
    code, out, err = cost(run, capsys, "--what-if", "nodes=4")
    assert code == 0, err
    assert "the rest here: $72.00, 2 h for 2,000 pictures, by its own pace" in out
    assert "together: $144, 4 h" in out
    assert (
        "the rest with nodes=4: unpriced, 0.5 h on sagemaker us-east-1 on_demand 4 x ml.p4de.24xlarge" in out
    )
    code, out, err = cost(run, capsys, "--what-if", "backend=azure,region=eastus,nodes=2")
    assert code == 0, err
    assert "1 h on azure eastus on_demand 2 x Standard_ND96amsr_A100_v4" in out
    assert "the rest with backend=azure,region=eastus,nodes=2: $" in out
    code, _, err = cost(run, capsys, "--what-if", "sku=ml.p5.48xlarge")
    assert code == 2
    assert "nobody has measured how fast h100-80gb runs these encoders" in err


def test_too_little_to_tell(tmp_path: Path) -> None:
    from isthmus.core.recipe import parse_recipe
    from isthmus.cost.encoding import encode_rest
    from isthmus.cost.spent import spent

    run = encode_run(tmp_path, finished=False)
    recipe = parse_recipe(json.dumps(run.read_run_json()["recipe"]), filename="x").recipe
    so_far = spent(recipe, [("enc-1", 60.0)], [], step=3, total=4000)
    with pytest.raises(UsageError, match="too little is done to tell"):
        encode_rest(recipe, so_far)
