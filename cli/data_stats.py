"""``isthmus data stats``, ``verify``: what a dataset holds, and whether it is as it was written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.output import counted, emit

if TYPE_CHECKING:
    from isthmus.storage.shards import VerifyReport

_AS_JSON = typer.Option(False, "--json", help="Print one JSON document.")
_FONTS = typer.Option([], "--font", metavar="FILE", help="Asked for characters first. May be repeated.")
_ROOTS = typer.Argument(help="A dataset's folder or URI; its roots, when its shards are spread over several.")


def register(group: typer.Typer) -> None:
    """Add the commands to `isthmus data`."""
    group.command("stats")(stats)
    group.command("verify")(verify)


def verify(
    roots: list[str] = _ROOTS,
    sample: int = typer.Option(
        0, "--sample", metavar="ROWS", min=0, help="Look into so many rows only, and at every file's size."
    ),
    seed: int = typer.Option(0, "--seed", min=0, help="Of the sample: another one draws other rows."),
    as_json: bool = _AS_JSON,
) -> None:
    """Check every checksum and every row's shape, dtype and finiteness. Exit code 1 when anything is wrong.

    With --sample: manifest, index, embeddings, the size of every file, and whole row groups that hold so many rows.

    Example: isthmus data verify ./data
    """
    from dataclasses import asdict

    from isthmus.storage.shards.verify import Problem
    from isthmus.storage.shards.verify import verify as check

    def show(problem: Problem) -> None:
        if not as_json:
            print(problem, flush=True)

    if sample:
        from isthmus.storage.shards.sample_check import unseen_share, verify_sample

        report = verify_sample(roots, sample, seed=seed, on_problem=show)
        unseen = unseen_share(report)
        emit(
            {"ok": report.ok, **asdict(report), "seed": seed, "unseen_share": unseen},
            as_json=as_json,
            text=_sampled(report, unseen),
        )
    else:
        if seed:
            from isthmus.errors import UsageError

            raise UsageError("--seed is of a sample", hint="add --sample ROWS")
        report = check(roots, on_problem=show)
        emit(
            {"ok": report.ok, **asdict(report)},
            as_json=as_json,
            text=(
                f"{counted(report.rows, 'row')} in {counted(report.files, 'file')}, {report.size / 1e6:.1f} MB: "
                + ("all as written" if report.ok else _count(report))
            ),
        )
    if not report.ok:
        raise typer.Exit(1)


def _sampled(report: VerifyReport, unseen: float) -> str:
    looked = (
        f"{counted(report.rows, 'row')} in {report.row_groups:,} of {counted(report.row_groups_of, 'row group')}, "
        f"{report.size / 1e6:.1f} MB"
    )
    if not report.ok:
        return f"{looked}: {_count(report)}"
    if not unseen:
        return f"{looked}: all as written"
    return (
        f"{looked}: as written, and every file has its size. Damage in more than {100 * unseen:.2g} % of the row groups "
        "would have shown with 95 % confidence"
    )


def _count(report: VerifyReport) -> str:
    return counted(len(report.problems), "problem")


def stats(
    roots: list[str] = _ROOTS,
    sheet: str = typer.Option(
        "",
        "--sheet",
        metavar="FILE.png",
        help="Decode some latents and write the pictures with their captions.",
    ),
    pictures: int | None = typer.Option(None, "--pictures", min=1, max=400, help="On the sheet; default 24."),
    resolution: int | None = typer.Option(None, "--resolution", help="Of the sheet; default: the largest."),
    recipe: str = typer.Option(
        "", "--recipe", help="Whose autoencoder decodes; of patch_pca it is beside the data."
    ),
    autoencoder: str = typer.Option(
        "", "--autoencoder", help="A folder, URI or hub name; instead of a recipe."
    ),
    device: str = typer.Option(
        "", "--device", help="Where it decodes: cpu, cuda; default: a GPU if there is one."
    ),
    seed: int | None = typer.Option(None, "--seed", min=0, help="Another one shows other rows; default 0."),
    fonts: list[str] = _FONTS,
    as_json: bool = _AS_JSON,
) -> None:
    """Say what a dataset holds: samples, buckets, resolutions, encoders, sizes; and show some of it.

    Example: isthmus data stats ./data --sheet sheet.png
    """
    from isthmus.errors import UsageError
    from isthmus.storage.shards.verify import stats as collect

    told = {
        "--pictures": pictures, "--resolution": resolution, "--recipe": recipe, "--autoencoder": autoencoder,
        "--device": device, "--seed": seed, "--font": fonts,
    }  # fmt: skip
    if not sheet and (lost := [name for name, value in told.items() if value not in (None, "", [])]):
        raise UsageError(f"{lost[0]} is of a sheet", hint="add --sheet FILE.png")
    found = collect(roots)
    if sheet:
        from isthmus.cli.data_looking import autoencoder_source, write_sheet

        found["sheet"] = write_sheet(
            roots,
            sheet,
            rows=pictures or 24,
            resolution=resolution,
            source=autoencoder_source(recipe, autoencoder),
            device=device or "auto",
            seed=seed or 0,
            fonts=fonts,
        )
    emit(found, as_json=as_json, text=lambda: _describe(found))


def _describe(found: dict[str, Any]) -> str:
    lines = [
        f"{counted(found['samples'], 'sample')} in {counted(found['shards'], 'shard')}, {found['bytes'] / 1e6:.1f} MB, "
        f"{counted(found['rejected'], 'image')} rejected",
        f"fingerprint  {found['fingerprint']}",
        f"source       {found['source'] or 'not told'}",
        f"blocks       {found['blocks']} of {found['rows_per_block']['least']} to "
        f"{found['rows_per_block']['most']} rows",
        f"captions     {found['captions']} a sample; {counted(found['prompts'], 'validation prompt')}",
    ]
    lines += [
        f"{resolution + ' px':<12} {counted(entry['samples'], 'sample')}, {entry['bytes'] / 1e6:.1f} MB of latents"
        for resolution, entry in found["resolutions"].items()
    ]
    lines += [
        f"bucket {bucket:<5} {counted(entry['samples'], 'sample')}; latents "
        + ", ".join(f"{shape} at {resolution} px" for resolution, shape in entry["latents"].items())
        for bucket, entry in found["buckets"].items()
    ]
    lines += [
        f"text         {name}: {entry['max_tokens']} tokens of {entry['width']}, "
        + ("none pooled" if entry["pooled_width"] is None else f"pooled {entry['pooled_width']}")
        for name, entry in found["text"].items()
    ]
    autoencoder = found["autoencoder"]
    lines.append(
        f"autoencoder  {autoencoder['kind']}, {autoencoder['latent_channels']} channels, "
        f"factor {autoencoder['factor']}"
    )
    lines += [line for name, entry in found["fields"].items() for line in _field(name, entry)]
    if "sheet" in found:
        shown = found["sheet"]
        lines.append(
            f"sheet        {counted(shown['rows'], 'picture')} at {shown['resolution']} px in {shown['file']}"
        )
    return "\n".join(lines)


def _field(name: str, entry: dict[str, Any]) -> list[str]:
    head = f"field {name}"
    if "told" not in entry:
        return [f"{head}: {entry['kind']}, made of the pictures"]
    if not entry["told"]:
        return [f"{head}: {entry['kind']}, told of no sample"]
    null = f", {entry['null']} null" if entry["null"] else ""
    if entry["kind"] == "number":
        form = ".4g" if entry["exact"] else ".3g"
        points = ", ".join(
            f"{float(at):.0%} {value:{form}}" for at, value in entry["quantiles"].items() if at != "0.5"
        )
        return [
            f"{head}: {entry['told']} numbers{null}; {entry['least']:.4g} to {entry['most']:.4g}, "
            f"median {entry['quantiles']['0.5']:{form}}, mean {entry['mean']:.4g}",
            f"    {points}",
        ]
    more = "more than " if entry["more_than_counted"] else ""
    words = [f"{word[:60]} {count}" for word, count in list(entry["most_frequent"].items())[:8]]
    shown = ", ".join(words) + (", ..." if entry["different"] > len(words) else "")
    return [f"{head}: {entry['told']} texts{null}, {more}{entry['different']} different: {shown}"]
