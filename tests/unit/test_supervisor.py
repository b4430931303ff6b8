"""The supervisor over a cloud on paper: completes, resubmits, fails over, keeps budgets; twice at once, and killed between."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paper import Paper
from training import recipe_data

from isthmus.backends.following import status_of
from isthmus.backends.launch import start
from isthmus.backends.prepare import Launch, prepare
from isthmus.backends.runs import find_current, record_of
from isthmus.backends.spec import State
from isthmus.backends.stopping import stop
from isthmus.backends.submission import put_down
from isthmus.backends.supervisor import Look, Supervisor
from isthmus.core.recipe import parse_recipe
from isthmus.errors import PreflightRefused, StorageError, UsageError
from isthmus.storage.rundir import RunDirectory

OFFERS = [{"backend": "paper", "region": "north", "tier": "spot"}, {"backend": "paper", "region": "south"}]
Begin = Callable[..., Launch]


@pytest.fixture
def begin(paper: Paper, tmp_path: Path, latents: dict[str, str]) -> Begin:
    """Prepares a launch of run `one` on paper."""

    def begin(run_id: str = "one", **sections: Any) -> Launch:
        data = recipe_data(latents["dit"])
        data["run_directory"] = str(tmp_path / "runs")
        for name, value in sections.items():
            data[name] = {**data.get(name, {}), **value}
        loaded = parse_recipe(json.dumps(data), filename="tiny.yaml")
        backends = () if data["compute"].get("offers") else ("paper",)
        return prepare(loaded, backends=backends, run_id=run_id, price=lambda *_: 10.0)

    return begin


def run_of(launch: Launch) -> RunDirectory:
    return RunDirectory(launch.job.run_uri)


def look(launch: Launch, **options: Any) -> Look:
    return Supervisor(launch.job.run_uri, **{"pause_s": 0.0, **options}).look()


def test_it_waits_for_what_runs_and_tells_how_it_ended(begin: Begin, paper: Paper, tmp_path: Path) -> None:
    launch = begin()
    start(launch, tmp_path)
    assert paper.jobs() == ["one-01"]
    assert look(launch).did == "waited"
    paper.set("one-01", "finished")
    ended = look(launch)
    assert (ended.did, ended.status.exit_code) == ("done", 0)
    assert paper.jobs() == ["one-01"]


def test_a_preempted_job_is_submitted_again_up_to_the_limit(
    begin: Begin, paper: Paper, tmp_path: Path
) -> None:
    launch = begin(compute={"max_restarts": 2})
    start(launch, tmp_path)
    for number in (1, 2):
        paper.set(f"one-0{number}", "preempted", "spot interruption")
        again = look(launch)
        assert (again.did, again.handle.native["job_id"]) == ("submitted", f"one-0{number + 1}")
        assert look(launch).did == "waited"
    paper.set("one-03", "preempted", "spot interruption")
    ended = look(launch)
    assert (ended.did, ended.status.exit_code) == ("done", 75)
    assert "compute.max_restarts is 2" in (ended.status.cause or "")
    assert [look(launch).did, look(launch).did] == ["done", "done"]
    assert len([event for event in run_of(launch).events("note") if "not restarted" in event["text"]]) == 1
    assert paper.jobs() == ["one-01", "one-02", "one-03"]
    assert run_of(launch).read_run_json()["job_ids"] == ["one-01", "one-02", "one-03"]
    submitted = run_of(launch).events("submitted")
    assert [event["by"] for event in submitted] == ["launch", "supervise", "supervise"]
    # The record of this machine follows.
    assert find_current("one").handle["native"] == {"job_id": "one-03", "region": "north"}


def test_a_failed_job_is_not(begin: Begin, paper: Paper, tmp_path: Path) -> None:
    launch = begin()
    start(launch, tmp_path)
    paper.set("one-01", "failed", "rank 3: the disk is full")
    ended = look(launch)
    assert (ended.did, ended.status.exit_code, ended.status.cause) == ("done", 1, "rank 3: the disk is full")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_connection_lost_while_submitting_makes_no_second_job(
    begin: Begin,
    paper: Paper,
    tmp_path: Path,
    when: Any,
) -> None:
    launch = begin()
    paper.break_network(when)
    with pytest.raises(StorageError) as caught:
        start(launch, tmp_path)
    assert "under the same name" in (caught.value.hint or "")
    record = find_current("one")
    assert status_of(record).state == "pending"
    with pytest.raises(StorageError):
        look(launch)
    paper.break_network("never")
    assert look(launch).did == "submitted"
    assert look(launch).did == "waited"
    assert paper.jobs() == ["one-01"]
    assert len(run_of(launch).events("submitted")) == 1


def test_the_same_launch_completes_what_one_before_it_began(
    begin: Begin, paper: Paper, tmp_path: Path
) -> None:
    launch = begin()
    paper.break_network("after")
    with pytest.raises(StorageError):
        start(launch, tmp_path)
    paper.break_network("never")
    again = begin()
    assert again.pending is not None
    assert start(again, tmp_path).native["job_id"] == "one-01"
    assert paper.jobs() == ["one-01"]
    with pytest.raises(UsageError, match="is pending already"):
        start(begin(), tmp_path)


def test_killed_between_any_two_writes_it_is_completed_under_its_name(
    begin: Begin,
    paper: Paper,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every write of a launch, to the store or to this machine, is the last one once."""

    class Killed(BaseException):
        pass

    import isthmus.storage.rundir.store as store

    left = 0

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def write(*arguments: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return method(*arguments)

        return write

    completed = 0
    for number in range(1, 30):
        with monkeypatch.context() as patch:
            for name in ("write", "create"):
                patch.setattr(store.LocalStore, name, counted(getattr(store.LocalStore, name)))
            left = number
            launch = begin(f"run-{number}")
            try:
                start(launch, tmp_path)
            except Killed:
                pass
            else:
                completed += 1
        if run_of(launch).exists():
            assert look(launch).did in ("submitted", "waited")
        else:
            start(begin(f"run-{number}"), tmp_path)
        assert look(launch).did == "waited"
        name = f"run-{number}-01"
        assert [job for job in paper.jobs() if job.startswith(f"run-{number}-")] == [name]
        assert [event["job_id"] for event in run_of(launch).events("submitted")] == [name]
        assert run_of(launch).read_run_json()["job_ids"] == [name]
        if completed > 1:
            break
    assert number > 6
    assert completed == 2


def test_two_supervisors_at_once_make_one_attempt(begin: Begin, paper: Paper, tmp_path: Path) -> None:
    launch = begin()
    start(launch, tmp_path)
    failed: list[str] = []
    for number in range(1, 8):
        paper.set(f"one-{number:02d}", "preempted", "spot interruption")
        barrier = threading.Barrier(4)
        did: list[str] = []

        def race(barrier: threading.Barrier = barrier, did: list[str] = did) -> None:
            barrier.wait()
            try:
                did.append(look(launch).did)
            except Exception as error:  # noqa: BLE001 - a loser must not fail, however late it comes
                failed.append(repr(error))

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(did) == 4, failed
        assert set(did) <= {"submitted", "waited"}
        assert paper.jobs() == [f"one-{one:02d}" for one in range(1, number + 2)]
    assert len(run_of(launch).events("submitted")) == 8


@pytest.mark.parametrize("then", ["running", "preempted"])
def test_a_supervisor_that_was_overtaken_looks_again(
    begin: Begin, paper: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: State
) -> None:
    launch = begin(compute={"max_restarts": 1})
    start(launch, tmp_path)
    paper.set("one-01", "preempted", "spot interruption")
    late = Supervisor(launch.job.run_uri, pause_s=0.0)
    prepare_late = late._prepared

    def overtaken(choice: int) -> Launch:
        # Between what it decided and what it does, another one submits: all restarts that there are.
        assert look(launch).did == "submitted"
        paper.set("one-02", then)
        return prepare_late(choice)

    with monkeypatch.context() as patch:
        patch.setattr(late, "_prepared", overtaken)
        assert late.look().did == "waited"
    assert paper.jobs() == ["one-01", "one-02"]
    assert late.look().did == ("waited" if then == "running" else "done")
    assert paper.jobs() == ["one-01", "one-02"]


def test_two_launches_of_one_run_at_once_make_one_job(begin: Begin, paper: Paper, tmp_path: Path) -> None:
    for number in range(5):
        name = f"run-{number}"
        launches = [begin(name) for _ in range(3)]
        barrier = threading.Barrier(3)
        refused: list[str] = []

        def race(launch: Launch, barrier: threading.Barrier = barrier, refused: list[str] = refused) -> None:
            barrier.wait()
            try:
                start(launch, tmp_path)
            except UsageError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=race, args=(launch,)) for launch in launches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 2, refused
        assert [job for job in paper.jobs() if job.startswith(f"{name}-")] == [f"{name}-01"]
        assert run_of(launches[0]).read_run_json()["job_ids"] == [f"{name}-01"]


def test_a_refusal_goes_on_to_the_next_offer(begin: Begin, paper: Paper, tmp_path: Path) -> None:
    launch = begin(compute={"offers": OFFERS})
    paper.full("north")
    with pytest.raises(PreflightRefused, match="insufficient capacity in north"):
        start(launch, tmp_path)
    said: list[str] = []
    found = look(launch, say=said.append)
    assert (found.did, found.handle.native["region"]) == ("submitted", "south")
    assert any("refused: insufficient capacity in north" in line for line in said)
    assert paper.jobs() == ["one-02"]
    assert run_of(launch).read_run_json()["offer"]["offer"]["region"] == "south"


def test_when_all_refuse_it_says_so_with_3(begin: Begin, paper: Paper, tmp_path: Path) -> None:
    launch = begin(compute={"offers": OFFERS})
    paper.full("north", "south")
    with pytest.raises(PreflightRefused):
        start(launch, tmp_path)
    ended = look(launch)
    assert (ended.did, ended.status.exit_code) == ("done", 3)
    assert paper.jobs() == []


def test_no_capacity_moves_the_run_at_once_and_it_comes_back_in_turn(
    begin: Begin,
    paper: Paper,
    tmp_path: Path,
) -> None:
    launch = begin(compute={"offers": OFFERS})
    start(launch, tmp_path)
    paper.set("one-01", "preempted", "CapacityError: no machines", begin=False)
    assert look(launch).handle.native["region"] == "south"
    paper.set("one-02", "preempted", "CapacityError: no machines", begin=False)
    assert look(launch).handle.native["region"] == "north"
    # Where the next one is known to refuse, it stays.
    paper.full("south")
    paper.set("one-03", "preempted", "CapacityError: no machines", begin=False)
    said: list[str] = []
    assert look(launch, say=said.append).handle.native["region"] == "north"
    assert any("no quota in south" in line for line in said)


def test_repeated_preemption_moves_the_run(begin: Begin, paper: Paper, tmp_path: Path) -> None:
    launch = begin(compute={"offers": OFFERS})
    start(launch, tmp_path)
    regions = []
    for number in range(1, 5):
        paper.set(f"one-{number:02d}", "preempted", "spot interruption")
        regions.append(look(launch).handle.native["region"])
    assert regions == ["north", "north", "south", "south"]


def test_attempts_that_never_begin_are_spaced(begin: Begin, paper: Paper, tmp_path: Path) -> None:
    launch = begin()
    start(launch, tmp_path)
    paper.set("one-01", "preempted", "CapacityError", begin=False)
    waiting = look(launch, pause_s=100.0)
    assert waiting.did == "waited"
    assert "the next attempt comes in" in (waiting.why or "")
    assert paper.jobs() == ["one-01"]


def test_another_place_is_asked_at_once_and_after_a_round_there_is_a_pause(
    begin: Begin, paper: Paper, tmp_path: Path
) -> None:
    launch = begin(compute={"offers": OFFERS})
    start(launch, tmp_path)
    paper.set("one-01", "preempted", "CapacityError", begin=False)
    assert look(launch, pause_s=100.0).handle.native["region"] == "south"
    paper.set("one-02", "preempted", "CapacityError", begin=False)
    assert look(launch, pause_s=100.0).did == "waited"
    later = look(launch, pause_s=100.0, clock=lambda: time.time() + 101)
    assert later.handle.native["region"] == "north"


def test_it_says_before_leaving_that_another_cloud_cannot_reach_the_run(
    begin: Begin,
    paper: Paper,
    tmp_path: Path,
) -> None:
    launch = begin(compute={"offers": [OFFERS[0], {"backend": "papyrus", "region": "east"}]})
    source = launch.job.source.model_copy(
        update={"run_directory": {"paper": str(tmp_path / "runs"), "papyrus": "memory://far/runs"}}
    )
    launch = replace(launch, job=replace(launch.job, source=source))
    start(launch, tmp_path)
    paper.set("one-01", "preempted", "CapacityError", begin=False)
    said: list[str] = []
    assert look(launch, say=said.append).backend == "paper"
    assert any("isthmus runs copy one --to memory://far/runs/one" in line for line in said)
    # Where both reach it, the run changes clouds and keeps its directory.
    moved = begin("two", compute={"offers": [OFFERS[0], {"backend": "papyrus", "region": "east"}]})
    start(moved, tmp_path)
    paper.set("two-01", "preempted", "CapacityError", begin=False)
    assert look(moved).backend == "papyrus"
    assert record_of(run_of(moved)).backend == "papyrus"


@pytest.mark.parametrize("budget", [{"max_hours": 1.0}, {"max_usd": 10.0}])
def test_the_budget_stops_a_running_job_and_keeps_a_preempted_one(
    begin: Begin,
    paper: Paper,
    tmp_path: Path,
    budget: dict[str, float],
) -> None:
    launch = begin(budget=budget)
    assert launch.rendered.request["usd_per_hour"] == 10.0
    start(launch, tmp_path)
    paper.set("one-01", "running")
    now = run_of(launch).events()[-1]["time"]
    assert look(launch, clock=lambda: now + 3000).did == "waited"
    assert look(launch, clock=lambda: now + 3700).did == "stopping"
    ended = look(launch, clock=lambda: now + 3700)
    assert (ended.did, ended.status.exit_code) == ("done", 4)
    assert run_of(launch).events("stop-requested")[0]["by"] == "budget"


def test_a_stop_holds_whatever_state_the_submission_is_in(begin: Begin, paper: Paper, tmp_path: Path) -> None:
    launch = begin("sent")
    start(launch, tmp_path)
    assert stop("sent")["state"] == "stopped"
    assert look(launch).status.exit_code == 4

    launch = begin("taken")
    start(launch, tmp_path)
    paper.set("taken-01", "preempted")
    assert stop("taken")["was"] == "preempted"
    ended = look(launch)
    assert (ended.did, ended.status.state, ended.status.exit_code) == ("done", "stopped", 4)

    launch = begin("half")
    paper.break_network("before")
    with pytest.raises(StorageError):
        start(launch, tmp_path)
    paper.break_network("never")
    assert stop("half")["state"] == "stopped"
    assert look(launch).status.exit_code == 4
    assert [name for name in paper.jobs() if name.startswith("half")] == []


def test_money_is_counted_at_each_attempt_s_own_price(begin: Begin, tmp_path: Path) -> None:
    from isthmus.backends.supervisor import usd_spent

    launch = begin()
    run = run_of(launch)
    for number, price in ((1, 10.0), (2, 3.0)):
        rendered = replace(launch.rendered, job_id=f"one-0{number}")
        assert put_down(run, number, rendered, by="launch", usd_per_hour=price) is not None
    events = [
        {"type": "submitted", "time": 0.0, "job_id": "one-01"},
        {"type": "started", "time": 0.0},
        {"type": "preempted", "time": 3600.0},
        {"type": "submitted", "time": 4000.0, "job_id": "one-02"},
        {"type": "started", "time": 7200.0},
    ]
    assert usd_spent(run.submissions().all(), events, 7200.0 + 7200.0) == pytest.approx(16.0)
    assert put_down(run, 2, launch.rendered, by="launch") is None


def test_what_a_cloud_says_is_put_down_without_its_secrets(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, rendered: object) -> None:
        raise PreflightRefused("quota; see https://x.blob.core.windows.net/c?sv=1&sig=Zq7secretZq7%3D")

    monkeypatch.setattr("paper.PaperBackend.submit", refuse)
    launch = begin()
    with pytest.raises(PreflightRefused):
        start(launch, tmp_path)
    assert "quota" in str(status_of(record_of(run_of(launch))).cause)
    texts = [path.read_text() for path in (tmp_path / "runs").rglob("*.json")]
    assert not any("sig=Zq7" in text for text in texts)


def test_nothing_secret_is_put_down(begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "Zq7secretZq7")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "Zq7secretZq7")
    start(begin(), tmp_path)
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"Zq7secretZq7" in text for text in texts)


def test_an_attempt_costs_what_the_one_before_it_did(begin: Begin, paper: Paper, tmp_path: Path) -> None:
    """The price may have come from a file that the supervisor does not have; without one nobody keeps the cap."""
    launch = begin(compute={"max_restarts": 5})
    start(launch, tmp_path)
    paper.set("one-01", "preempted", "spot interruption")
    look(launch, price=lambda *_: None)
    assert paper.job("one-02")["request"]["usd_per_hour"] == 10.0
    paper.set("one-02", "preempted", "spot interruption")
    look(launch, price=lambda *_: 7.0, keep_prices=False)
    assert paper.job("one-03")["request"]["usd_per_hour"] == 7.0
    again = [one.data["usd_per_hour"] for one in run_of(launch).submissions().all()]
    assert again == [10.0, 10.0, 7.0]
    assert run_of(launch).submissions().all()[1].data["runs_on"]["region"] == "north"


def test_a_job_that_its_cloud_took_and_does_not_know_is_said_with_a_hint(
    begin: Begin, paper: Paper, tmp_path: Path
) -> None:
    """Deleted, or looked for with another account: nobody can tell, so nothing is submitted and nobody waits for ever."""
    launch = begin()
    start(launch, tmp_path)
    (paper.folder / "jobs" / "one-01.json").unlink()
    status = status_of(find_current("one"))
    assert (status.state, status.missing) == ("unknown", True)
    assert status.detail is not None
    assert status.detail.startswith(
        "paper has no job one-01; look with the account that it was submitted with (region north)"
    )
    assert "`isthmus resume one` goes on" in status.detail
    assert look(launch).did == "waited", "a list may lag behind what was just taken"
    with pytest.raises(UsageError, match=r"paper has no job one-01, which it took at 20.* UTC") as told:
        look(launch, clock=lambda: time.time() + 601)
    assert "isthmus resume one" in str(told.value.hint)
    assert paper.jobs() == []
    assert [event["type"] for event in run_of(launch).events()] == ["submitted"]


def test_a_job_that_is_gone_after_it_told_how_it_ended_has_ended_so(
    begin: Begin, paper: Paper, tmp_path: Path
) -> None:
    launch = begin()
    start(launch, tmp_path)
    paper.set("one-01", "preempted", "spot interruption")
    (paper.folder / "jobs" / "one-01.json").unlink()
    assert look(launch).handle.native["job_id"] == "one-02"
    paper.set("one-02", "running")
    (paper.folder / "jobs" / "one-02.json").unlink()
    ended = look(launch)
    assert (ended.did, ended.status.state, ended.status.exit_code) == ("done", "failed", 1)
    assert ended.status.cause == "paper has no job one-02, and its run directory tells of no end"


def test_a_job_that_is_gone_can_be_stopped(begin: Begin, paper: Paper, tmp_path: Path) -> None:
    launch = begin()
    start(launch, tmp_path)
    (paper.folder / "jobs" / "one-01.json").unlink()
    assert stop("one")["state"] == "stopped"
    assert run_of(launch).events("stop-requested")
    ended = look(launch, clock=lambda: time.time() + 601)
    assert (ended.did, ended.status.exit_code) == ("done", 4)
