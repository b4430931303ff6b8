"""The quickstart's stages, each of which can be interrupted and goes on from where it was.

Pictures are encoded into a neighbouring folder that is renamed when it is whole; training goes on from its newest
checkpoint; the rest takes seconds and is done again. What was decided is in ``quickstart.json``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from isthmus.cli.quickstart_training import TIMED_STEPS, TIMING, Timing, steps_within, time_steps, train
from isthmus.core.recipe import LoadedRecipe, load_recipe
from isthmus.core.recipe.dump import recipe_hash
from isthmus.errors import DataError, Preempted, StorageError, UsageError
from isthmus.files import replace_file

Say = Callable[[str], None]

RECIPE = "quickstart"
VARIANTS = 24
"""Pictures of each training caption."""
HELD_OUT_VARIANTS = 8
TRAINING_SAMPLES, HELD_OUT_SAMPLES = 66, 65
"""Three pictures of each of the 22 training captions, thirteen of each of the 5 held-out pairs."""
_STATE, _LOCK = "quickstart.json", ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says."""

    folder: Path
    seed: int = 0
    minutes: float = 6.0
    """Training takes no longer; fewer steps are done on a slow machine."""
    overrides: tuple[str, ...] = ()
    """Of the recipe."""


@dataclass(slots=True)
class State:
    """What a quickstart folder remembers."""

    seed: int
    recipe_hash: str
    """Of the recipe before its steps were decided."""
    steps: int | None = None
    timing: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    path: Path = field(default=Path(), compare=False)

    def save(self) -> None:
        """Atomically."""
        data = {name: value for name, value in asdict(self).items() if name != "path"}
        replace_file(self.path, json.dumps(data, indent=1) + "\n")


def quickstart(settings: Settings, say: Say) -> dict[str, Any]:
    """All stages; returns what ``--json`` prints.

    Raises:
        UsageError: the folder holds another quickstart, or something else.
        NotInstalled: torch, the pictures or the text encoder are missing.
        Preempted: interrupted; the same call goes on.
        TrainingFailed, DataError, StorageError: as they come.
    """
    from isthmus.core.encode.pretrained import require_torch

    require_torch("the quickstart")
    again = f"isthmus quickstart --run-dir {settings.folder}" + (
        f" --seed {settings.seed}" if settings.seed else ""
    )
    try:
        with _claimed(settings.folder):
            return _stages(settings, say)
    except KeyboardInterrupt:
        raise Preempted("interrupted", hint=f"go on: {again}") from None
    except OSError as error:
        raise StorageError(
            error.strerror or str(error), where=str(error.filename or settings.folder)
        ) from error


def _stages(settings: Settings, say: Say) -> dict[str, Any]:
    base = load_recipe(RECIPE, [f"seed={settings.seed}", *settings.overrides])
    state = _state(settings, base)
    if state.result is not None and all(Path(state.result[name]).exists() for name in ("grid", "report")):
        say(f"this quickstart finished before; another --run-dir starts a new one\n{summary(state.result)}")
        return state.result
    data, held_out = settings.folder / "data", settings.folder / "heldout"
    _encode(settings, base, data, held_out, say)
    _verify([data, held_out], say)
    if state.steps is None:
        say(f"3/6 training, at most {settings.minutes:g} min")
        wanted = base.recipe.stages[0].total_steps
        if wanted > TIMED_STEPS:
            timing = time_steps(_placed(settings, base, list(TIMING)), settings.folder / "timing")
            state.timing = asdict(timing)
            wanted = steps_within(timing, settings.minutes, wanted)
        state.steps = wanted
        state.save()
    else:
        say("3/6 training")
    say(_decision(state, base, settings.minutes))
    # A tenth of a short run, where the recipe's warm-up would be most of it.
    warm_up = min(base.recipe.stages[0].lr_warmup_steps, state.steps // 10)
    length = [f"stages.0.steps={state.steps}", f"stages.0.lr_warmup_steps={warm_up}"]
    run_uri = train(_placed(settings, base, length), say)
    result = _judge(settings, run_uri, say)
    state.result = result
    state.save()
    say(summary(result))
    return result


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """The folder, ours alone. Raises UsageError when another process works in it, or it is something else."""
    import fcntl

    if folder.exists():
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else {"a file"}
        if names - {_LOCK} and _STATE not in names:
            raise UsageError(f"{folder} is not a quickstart's folder", hint="choose another --run-dir")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another quickstart is at work in {folder}") from None
        yield


def _state(settings: Settings, base: LoadedRecipe) -> State:
    path = settings.folder / _STATE
    wanted = State(seed=settings.seed, recipe_hash=recipe_hash(base.recipe), path=path)
    if not path.exists():
        wanted.save()
        return wanted
    try:
        found = State(**json.loads(path.read_text()), path=path)
    except (ValueError, TypeError):
        raise UsageError("cannot be read", where=str(path), hint=f"remove {settings.folder}") from None
    hint = f"choose another --run-dir, or remove {settings.folder}"
    if found.seed != wanted.seed:
        raise UsageError(
            f"holds a quickstart of seed {found.seed}, not {wanted.seed}",
            where=str(settings.folder),
            hint=hint,
        )
    if found.recipe_hash != wanted.recipe_hash:
        raise UsageError("holds a quickstart of another recipe", where=str(settings.folder), hint=hint)
    return found


def _placed(settings: Settings, base: LoadedRecipe, overrides: list[str]) -> LoadedRecipe:
    """The recipe with its data and run in the folder."""
    folder = settings.folder.resolve()
    places = [
        f"data.sources.0.uri={json.dumps(str(folder / 'data'))}",
        f"run_directory={json.dumps(str(folder / 'runs'))}",
    ]
    if base.recipe.validation.sources:
        places.append(f"validation.sources.0.uri={json.dumps(str(folder / 'heldout'))}")
    return load_recipe(RECIPE, [f"seed={settings.seed}", *settings.overrides, *places, *overrides])


def _encode(settings: Settings, base: LoadedRecipe, data: Path, held_out: Path, say: Say) -> None:
    from isthmus.core.encode.autoencoders import load_autoencoder
    from isthmus.core.encode.emoji import EmojiSource
    from isthmus.core.encode.encode import encode

    size = base.recipe.stages[0].resolution
    for folder, source in (
        (data, EmojiSource(size=size, variants=VARIANTS, seed=settings.seed)),
        (held_out, EmojiSource(size=size, variants=HELD_OUT_VARIANTS, seed=settings.seed, held_out=True)),
    ):
        kind = "held-out" if source.held_out else "training"
        count = len(source.captions) * source.variants
        head = f"1/6 drawing and encoding {count} {kind} pictures of {len(source.captions)} captions"
        if (folder / "manifest.json").exists():
            say(f"{head}: done before, in {folder}")
            continue
        say(head)
        partial = folder.with_name(f"{folder.name}.partial")
        for leftover in (partial, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        section = base.recipe.encoders.autoencoder
        # Held-out latents must be those of the autoencoder that was fitted to the training pictures.
        fitted = load_autoencoder(section, str(data), device="cpu") if source.held_out else None
        manifest = encode(source, str(partial), base.recipe, autoencoder=fitted, device="cpu")
        partial.rename(folder)
        say(f"    {manifest.samples} samples, {manifest.size / 1e6:.1f} MB, in {folder}")


def _verify(folders: list[Path], say: Say) -> None:
    from isthmus.storage.shards.verify import verify

    say("2/6 verifying every checksum and row")
    for folder in folders:
        report = verify(str(folder))
        if not report.ok:
            raise DataError(
                f"{len(report.problems)} problems; the first: {report.problems[0]}",
                where=str(folder),
                hint=f"remove {folder} and call again",
            )
        say(f"    {folder}: {report.rows} rows, all as written")


def _decision(state: State, base: LoadedRecipe, minutes: float) -> str:
    steps, of = state.steps, base.recipe.stages[0].total_steps
    if state.timing is None:
        return f"    {steps} steps"
    timing = Timing(**state.timing)
    why = "as in the recipe" if steps == of else f"of the recipe's {of}, to end within {minutes:g} min"
    return f"    {timing.seconds_per_step:.3f} s a step, timed over {timing.steps} real ones: {steps} steps, {why}"


def _judge(settings: Settings, run_uri: str, say: Say) -> dict[str, Any]:
    """Samples, their caption match, the grid and the report."""
    from isthmus.cli.quickstart_judge import judge
    from isthmus.cli.quickstart_training import training_figures
    from isthmus.core.report import write_report

    figures = training_figures(run_uri)
    matches, grid = judge(
        run_uri,
        grid=settings.folder / "grid.png",
        seed=settings.seed,
        training=TRAINING_SAMPLES,
        held_out=HELD_OUT_SAMPLES,
        say=say,
    )
    say("6/6 writing the report")
    report = write_report(run_uri, str(settings.folder / "report.html"))
    return {"run": run_uri, **figures, **matches, "grid": str(grid), "report": str(report)}


def summary(result: dict[str, Any]) -> str:
    """The end of the printed output."""
    run = result["run"]
    return "\n".join(
        [
            f"trained {result['steps']} steps in {result['seconds']:.0f} s, {result['samples_per_s']:.0f} "
            f"samples/s, data wait {100 * result['data_wait_fraction']:.2f} %",
            f"caption match      {result['caption_match']:.2f} on training captions",
            f"                   {result['heldout_caption_match']:.2f} on held-out pairs, never trained on",
            f"                   {result['shuffled_caption_match']:.2f} with captions shuffled: the control",
            f"grid    {result['grid']}",
            f"report  {result['report']}",
            "next:",
            f'  isthmus sample {run} --prompt "a purple heart" --prompt "a green heart"',
            f"  isthmus export {run} ./pipeline",
            "  isthmus recipes show quickstart > my.yaml",
            "  isthmus data encode FOLDER_OF_CAPTIONED_PICTURES ./data --recipe my.yaml",
        ]
    )
