"""``isthmus compare --measure``: short runs on real backends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.output import emit

if TYPE_CHECKING:
    from isthmus.cost.assumptions import Assumptions
    from isthmus.cost.measure import Measured


def measure(
    recipe: str,
    overrides: Sequence[str],
    backends: Sequence[str],
    *,
    steps: int | None,
    prices: str,
    assume: Assumptions,
    as_json: bool,
) -> None:
    """Measures, prints what was found, and exits with the code of the first failure, if any."""
    from isthmus.cli.costing import catalog_of, measured_folder
    from isthmus.cost.measure import measure as measured

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    found = measured(
        recipe,
        overrides,
        backends,
        catalog=catalog_of(prices),
        folder=measured_folder(),
        steps=steps,
        assume=assume,
        say=say,
    )
    show(found, as_json=as_json)
    failed = [one.error for one in found if one.error is not None]
    if failed:
        raise typer.Exit(failed[0].exit_code)


def show(found: Sequence[Measured], *, as_json: bool) -> None:
    """Prints what each backend's short run said."""
    emit([_facts(one) for one in found], as_json=as_json, text=lambda: _text(found))


def _facts(one: Measured) -> dict[str, Any]:
    if one.measurement is None or one.estimate is None:
        return {"backend": one.backend, "error": str(one.error)}
    from isthmus.cost.table import estimate_json

    return {
        "backend": one.backend,
        "measurement": one.measurement.to_json(),
        "prediction": estimate_json(one.estimate),
        "measured_share": one.share,
        "measured_steps_share": one.steps_share,
        "file": str(one.file),
    }


def _text(found: Sequence[Measured]) -> str:
    from isthmus.cost.table import amount, dollars

    lines = []
    for one in found:
        if one.measurement is None or one.estimate is None:
            lines.append(f"{one.backend}: {one.error}")
            continue
        whole = one.estimate
        usd = "unpriced" if whole.usd is None else dollars(whole.usd)
        low, high = whole.hours_interval
        lines.append(f"{whole.place.label}: {usd}, {amount(whole.hours)} h ({amount(low)} to {amount(high)})")
        for stage, speed in zip(whole.by_stage, one.measurement.stages, strict=True):
            lines.append(
                f"  {stage.name}: {amount(speed.images_per_s)} images/s ({amount(speed.low)} to {amount(speed.high)}) "
                f"over {speed.steps} steps: {amount(stage.hours)} h"
            )
        figures = one.measurement.gpu_figures
        if figures:
            told = ", ".join(f"{name.replace('_', ' ')} {value:.0f} %" for name, value in figures.items())
            lines.append(f"  {told}")
        lines.append(
            f"  the short run: {one.steps} steps, {100 * (one.steps_share or 0):.1f} % of all; "
            f"{one.measurement.seconds:.0f} s with its start, {100 * (one.share or 0):.1f} % of that time"
        )
        lines.append(f"  kept in {one.file}")
    return "\n".join(lines)
