"""The sections of the page, each a string of HTML; empty when the run has nothing for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from statistics import median

from isthmus.core.report.charts import render
from isthmus.core.report.collect import Row, RunData
from isthmus.core.report.encoding import encoding_tiles
from isthmus.core.report.images import Picture
from isthmus.core.report.reading import reading_charts
from isthmus.core.report.system import energy_kilowatt_hours, system_charts
from isthmus.core.report.text import duration, escape, figure, finite, moment, short, size
from isthmus.core.report.training import Training, validation_charts

_MAX_EVENTS = 300
_SAID = ("message", "text", "cause", "reason")
"""Fields of an event that are sentences; with a message, the others only repeat it in parts."""
_FIRST_FIELDS = (*_SAID, "rank", "step", "attempt")
_HIDDEN = ("type", "time", "lease")


def header(data: RunData) -> str:
    """Name, state, where and when."""
    state = data.state()
    facts = [
        f"on {escape(data.run['backend'], 60)}" if data.run.get("backend") else "",
        f"created {moment(data.run.get('created'))} UTC" if finite(data.run.get("created")) else "",
        f"{data.run['world_size']} ranks" if isinstance(data.run.get("world_size"), int) else "",
    ]
    facts = [fact for fact in facts if fact] + [f"<code>{escape(data.uri, 300)}</code>"]
    return (
        f'<header><div class="title"><h1>{escape(title(data), 120)}</h1>'
        f'<span class="state {state}">{state}</span></div>'
        f'<p class="facts">{" <span>·</span> ".join(facts)}</p>{_cause(data)}</header>'
    )


def title(data: RunData) -> str:
    """The run's id."""
    return str(data.run.get("id") or data.run.get("name") or "run")


def _cause(data: RunData) -> str:
    failed = data.failure()
    if failed is None:
        return ""
    cause = str(failed.get("cause") or failed.get("message") or "no cause was recorded")
    named = failed.get("rank") is None or cause.startswith("rank ")
    where = "" if named else f"Rank {escape(failed['rank'], 20)}: "
    return f'<p class="cause"><strong>Failed.</strong> {where}{escape(cause)}</p>'


def tiles(data: RunData, training: Training) -> str:
    """The figures that people open a report for."""
    found = encoding_tiles(data) if data.encodes else _training_tiles(data, training)
    alarms = sum(1 for event in data.events if event.get("type") == "alarm")
    if alarms:
        found.append(("Alarms", f"{alarms:,}", "see Events"))
    cells = "".join(
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="aside">{escape(aside)}</dd></div>'
        for name, value, aside in found
    )
    return f'<dl class="tiles">{cells}</dl>' if cells else ""


def _training_tiles(data: RunData, training: Training) -> list[tuple[str, str, str]]:
    found: list[tuple[str, str, str]] = []
    if data.train:
        done, total = data.train[-1]["step"], data.total_steps()
        aside = f"of {short(total)}" if total else ""
        if total and done >= total:
            aside = "all of the recipe's"
        found.append(("Steps", f"{done:,}", aside))
        samples = finite(data.train[-1].get("samples"))
        if samples is not None:
            found.append(("Samples", short(samples), "seen"))
    seconds = sum(attempt.seconds for attempt in data.attempts)
    if seconds:
        count = len(data.attempts)
        found.append(("Duration", duration(seconds), f"over {count} attempts" if count > 1 else ""))
    speeds = [
        speed
        for row in data.train[-200:]
        if row.get("stage") == data.train[-1].get("stage")
        and (speed := finite(row.get("samples_per_s"))) is not None
    ]
    if speeds:
        found.append(("Throughput", short(float(f"{median(speeds):.4g}")), "samples/s, recent median"))
    wait = training.data_wait_fraction()
    if wait is not None:
        found.append(("Data wait", f"{100 * wait:.2g} %", "of step time"))
    loss = training.recent_loss()
    if loss is not None:
        found.append(("Loss", figure(loss), "recent mean"))
    validation = [loss for row in data.validation if (loss := finite(row.get("loss"))) is not None]
    if validation:
        best = min(validation)
        found.append(
            (
                "Validation loss",
                figure(validation[-1]),
                f"best {figure(best)}" if best < validation[-1] else "the best so far",
            )
        )
    energy = energy_kilowatt_hours(data)
    if energy is not None:
        found.append(("GPU energy", f"{figure(energy, 3)} kWh", "all nodes"))
    skipped = sum(1 for row in data.train if row.get("skipped") is True)
    if skipped:
        found.append(("Skipped steps", f"{skipped:,}", "loss or gradient not finite"))
    if data.redone_steps:
        found.append(("Steps done twice", f"{data.redone_steps:,}", "after restarts"))
    return found


def training_section(training: Training) -> str:
    """The charts over steps."""
    charts = "".join(render(chart) for chart in training.charts())
    return (
        f'<div class="charts">{charts}</div>'
        if charts
        else '<p class="empty">No step has been recorded yet.</p>'
    )


def validation_section(data: RunData, training: Training) -> str:
    """Validation loss, whole and by timestep."""
    charts = "".join(render(chart) for chart in validation_charts(data, training))
    return f'<div class="charts">{charts}</div>' if charts else ""


def reading_section(data: RunData, training: Training) -> str:
    """How the data was read."""
    charts = "".join(render(chart) for chart in reading_charts(data, training))
    return f'<div class="charts">{charts}</div>' if charts else ""


def samples_section(data: RunData) -> str:
    """The latest grid large, the earlier ones small, oldest first."""
    if not data.pictures:
        return ""
    *earlier, last = data.pictures
    left_out = data.all_pictures - len(data.pictures)
    aside = f'<p class="note">{left_out} more grids are in the run directory.</p>' if left_out else ""
    return (
        f'<div class="latest">{_picture(last)}</div>'
        + (f'<div class="grids">{"".join(map(_picture, earlier))}</div>' if earlier else "")
        + aside
    )


def _picture(picture: Picture) -> str:
    step = f"{picture.step:,}"
    if not picture.data_uri:
        return f'<figure><div class="missing">{escape(picture.missing)}</div><figcaption>step {step}</figcaption></figure>'
    return (
        f'<figure><img src="{picture.data_uri}" width="{picture.width}" height="{picture.height}" '
        f'alt="Samples at step {step}"><figcaption>step {step}</figcaption></figure>'
    )


def system_section(data: RunData) -> str:
    """What the nodes measured."""
    charts = "".join(render(chart) for chart in system_charts(data))
    return f'<div class="charts">{charts}</div>' if charts else ""


def events_section(data: RunData) -> str:
    """Attempts, and what happened in order; checkpoints have their own table."""
    told = [event for event in data.events if event.get("type") != "checkpoint-committed"]
    if not told:
        return ""
    left_out = max(0, len(told) - _MAX_EVENTS)
    shown = [*told[: _MAX_EVENTS // 3], *told[-(_MAX_EVENTS - _MAX_EVENTS // 3) :]] if left_out else told
    start = next((time for event in told if (time := finite(event.get("time"))) is not None), None)
    rows = []
    for event in shown:
        kind, time = str(event.get("type")), finite(event.get("time"))
        after = (
            f"+{duration(time - start)}" if time is not None and start is not None and time >= start else ""
        )
        known = kind if kind in _EVENT_LOOKS else "note"
        rows.append(
            f'<li class="{known}"><span class="when"><time>{moment(time)}</time><span>{after}</span></span>'
            f'<span class="kind">{escape(kind, 40)}</span><span class="what">{_fields(event)}</span></li>'
        )
    aside = (
        f'<p class="note">{left_out:,} events in the middle are left out. Times are UTC.</p>'
        if left_out
        else ""
    )
    return _attempts_table(data) + f'<ol class="events">{"".join(rows)}</ol>' + aside


_EVENT_LOOKS = {
    "submitted",
    "started",
    "resumed",
    "preempted",
    "stop-requested",
    "stopped",
    "alarm",
    "finished",
    "failed",
    "note",
}


def _fields(event: Row) -> str:
    names = [name for name in _FIRST_FIELDS if name in event]
    if "message" not in event:
        names += [name for name in event if name not in (*_FIRST_FIELDS, *_HIDDEN)]
    parts = []
    for name in names[:12]:
        value = event[name]
        if value is None:
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        told = escape(text, 600)
        parts.append(told if name in _SAID else f'<span class="field">{escape(name, 40)}</span> {told}')
    return ' <span class="dot">·</span> '.join(parts)


def _attempts_table(data: RunData) -> str:
    if len(data.attempts) < 2:
        return ""
    rows = [
        [
            str(attempt.number),
            moment(attempt.started),
            duration(attempt.seconds) if attempt.seconds else "–",
            "–" if attempt.first_step is None else f"{attempt.first_step:,}",
            "–" if attempt.last_step is None else f"{attempt.last_step:,}",
            attempt.outcome,
        ]
        for attempt in data.attempts[-100:]
    ]
    what = ["from picture", "to picture"] if data.encodes else ["first step", "last step"]
    return _table(["attempt", "started (UTC)", "duration", *what, "ended"], rows)


def checkpoints_section(data: RunData) -> str:
    """The committed checkpoints."""
    if not data.checkpoints:
        return ""
    times = {
        event.get("step"): event.get("time")
        for event in data.events
        if event.get("type") == "checkpoint-committed"
    }
    rows = [
        [f"{step:,}", "–" if count is None else size(count), moment(times.get(step))]
        for step, count in data.checkpoints[-50:]
    ]
    return _table(["step", "size", "committed (UTC)"], rows)


def recipe_section(data: RunData) -> str:
    """The recipe as trained, folded."""
    if not data.recipe_text:
        return ""
    lines = data.recipe_text.count("\n")
    count = "1 line" if lines == 1 else f"{lines} lines"
    return f"<details><summary>recipe.yaml, {count}</summary><pre>{escape(data.recipe_text, 200_000)}</pre></details>"


def environment_section(data: RunData) -> str:
    """What it ran on and with: enough to do it again."""
    run = data.run
    git = run.get("git")
    commit = ""
    if isinstance(git, dict) and git.get("sha"):
        commit = f"{git['sha']}{' with uncommitted changes' if git.get('dirty') else ''}"
    packages = run.get("packages")
    pairs: list[tuple[str, object]] = [
        ("git commit", commit),
        ("recipe hash", run.get("recipe_hash")),
        ("lock hash", run.get("lock_hash")),
        ("image", run.get("image")),
        ("datasets", run.get("dataset_fingerprints")),
        ("jobs", run.get("job_ids")),
        ("Python", run.get("python")),
        *(sorted(packages.items()) if isinstance(packages, dict) else []),
    ]
    rows = [(name, _plain(value)) for name, value in pairs if value]
    body = "".join(
        f"<div><dt>{escape(name, 60)}</dt><dd>{escape(value, 400)}</dd></div>" for name, value in rows
    )
    return f'<dl class="pairs">{body}</dl>' if body else ""


def _plain(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key}: {item}" for key, item in value.items())
    return str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="numbers"><thead><tr>{titles}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
