"""What ``isthmus cost run`` says of an encode job: pictures, and the rest by its own pace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isthmus.cli.output import emit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isthmus.backends.runs import Record
    from isthmus.core.recipe.schema import Recipe
    from isthmus.cost.catalog import Catalog
    from isthmus.cost.encoding import EncodeRest
    from isthmus.cost.placing import Place
    from isthmus.cost.spent import Spent


def tell(
    record: Record,
    recipe: Recipe,
    so_far: Spent,
    catalog: Catalog,
    changes: Mapping[str, Any] | None,
    change: str,
    *,
    as_json: bool,
) -> None:
    """Prints it.

    Args:
        changes: of `--what-if`, which was `change` in words.
    """
    from isthmus.cli.costing import warn
    from isthmus.cost.encoding import encode_rest
    from isthmus.errors import IsthmusError

    here: EncodeRest | None = None
    other: tuple[Place, EncodeRest] | None = None
    try:
        here = encode_rest(recipe, so_far) if so_far.total_steps else None
    except IsthmusError as error:
        warn([f"the rest is not estimated: {error}"])
    if changes is not None:
        where = _elsewhere(recipe, so_far, catalog, changes)
        other = where, encode_rest(recipe, so_far, where)
    facts: dict[str, Any] = {"run": record.id, **_facts(so_far, here)}
    if other is not None:
        facts["what_if"] = {"changes": change, "place": other[0].label, **_rest_facts(other[1])}
    emit(facts, as_json=as_json, text=lambda: _text(record.id, so_far, here, other, change))


def _elsewhere(recipe: Recipe, so_far: Spent, catalog: Catalog, changes: Mapping[str, Any]) -> Place:
    from dataclasses import replace

    from isthmus.cli.cost_run import place_of
    from isthmus.cost.placing import place

    was = place_of(so_far)
    told = {**was, **changes}
    if told["backend"] != was["backend"]:
        told = dict(changes)  # another cloud has other regions and machines
    nodes = told.pop("nodes", None)
    found = place(recipe, catalog, **{**told, "backend": told.get("backend") or "local"})
    # Its ranks exchange nothing: any number of machines will do.
    return found if nodes is None else replace(found, nodes=nodes)


def _facts(so_far: Spent, here: EncodeRest | None) -> dict[str, Any]:
    from isthmus.cli.cost_run import attempt_facts

    return {
        "usd": so_far.usd,
        "hours": so_far.hours,
        "pictures": so_far.step,
        "expected": so_far.total_steps or None,
        "attempts": attempt_facts(so_far),
        "estimate_at_launch": so_far.estimate,
        "rest": None if here is None else _rest_facts(here),
    }


def _rest_facts(rest: EncodeRest) -> dict[str, Any]:
    return {"pictures": rest.pictures, "hours": rest.hours, "usd": rest.usd, "basis": rest.basis}


def _text(
    run_id: str, so_far: Spent, here: EncodeRest | None, other: tuple[Place, EncodeRest] | None, change: str
) -> str:
    from isthmus.cli.cost_run import attempt_lines, money
    from isthmus.cost.table import amount

    of = f" of about {so_far.total_steps:,} ({so_far.share:.0%})" if so_far.total_steps else ""
    pictures = "no picture yet" if not so_far.step else f"{so_far.step:,} pictures{of}"
    pace = f", {so_far.step / so_far.hours / 3600:,.1f} images/s" if so_far.step and so_far.hours else ""
    lines = [
        f"{run_id}: {money(so_far.usd)}, {amount(so_far.hours)} h, {pictures}{pace}",
        *attempt_lines(so_far),
    ]
    if here is not None and here.pictures:
        lines.append(
            f"  the rest here: {money(here.usd)}, {amount(here.hours)} h for {here.pictures:,} pictures, by {here.basis}"
        )
        if so_far.usd is not None and here.usd is not None:
            lines.append(f"  together: {money(so_far.usd + here.usd)}, {amount(so_far.hours + here.hours)} h")
    if other is not None:
        place, rest = other
        lines.append(
            f"  the rest with {change}: {money(rest.usd)}, {amount(rest.hours)} h on {place.label}, by {rest.basis}"
        )
    return "\n".join(lines)
