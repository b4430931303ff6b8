"""`isthmus compare --measure` of the quickstart recipe on both emulated clouds, then the whole runs it predicted.

    python benchmarks/measured_compare.py [--backend azure,sagemaker] [--json]

For each cloud: the quickstart's data go into the emulated store, a short run is launched and measured (5 % of the steps),
the prediction is in its file, and only then the whole recipe is launched and timed by its own events. Prints predicted and
taken seconds, and what the short run was of the whole: steps, and time with its start. The wait for machines is the cloud's
and is left out of both. Some ten minutes; on a busy machine the two minutes differ by more than any prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from isthmus.core.recipe import load_recipe
from isthmus.rehearsal.clouds import check_installed, open_cloud
from isthmus.storage import copying
from isthmus.storage.rundir import RunDirectory

VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Of every container: two processes share two cores."""
ALLOCATION = ("node allocation", "image pull")


def isthmus(folder: Path, environment: dict[str, str], *words: str, code: int = 0) -> Any:
    """What the command prints with --json."""
    done = subprocess.run(
        [sys.executable, "-m", "isthmus", *words, "--json"],
        stdout=subprocess.PIPE, text=True, cwd=folder, env=environment, check=False,
    )  # fmt: skip
    if done.returncode != code:
        raise SystemExit(f"error: isthmus {' '.join(words)} ended with {done.returncode}")
    return json.loads(done.stdout)


def make_data(folder: Path) -> dict[str, Path]:
    """The quickstart's datasets, as the quickstart makes them."""
    from isthmus.cli.quickstart_run import HELD_OUT_VARIANTS, VARIANTS
    from isthmus.core.encode.autoencoders import load_autoencoder
    from isthmus.core.encode.emoji import EmojiSource
    from isthmus.core.encode.encode import encode

    recipe = load_recipe("quickstart").recipe
    size = recipe.stages[0].resolution
    training, held_out = folder / "data", folder / "heldout"
    encode(EmojiSource(size=size, variants=VARIANTS, seed=0), str(training), recipe, device="cpu")
    fitted = load_autoencoder(recipe.encoders.autoencoder, str(training), device="cpu")
    source = EmojiSource(size=size, variants=HELD_OUT_VARIANTS, seed=0, held_out=True)
    encode(source, str(held_out), recipe, autoencoder=fitted, device="cpu")
    return {"data": training, "held_out": held_out}


def one(backend: str, data: dict[str, Path], folder: Path, steps: int | None) -> dict[str, Any]:
    """Measured, predicted, run."""
    base = load_recipe("quickstart").recipe
    cloud = open_cloud(backend, base, folder / "cloud", VARIABLES)
    try:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AWS_", "AZURE", "IDENTITY_", "MSI_", "ISTHMUS_"))
        }
        environment |= {**cloud.environment(), "XDG_STATE_HOME": str(folder / "state")}
        os.environ.update(cloud.environment())
        place = cloud.place(base, None)
        for root, target in ((data["data"], place.sources[0]), (data["held_out"], place.held_out[0])):
            source = copying.Tree(str(root))
            items = [copying.Item(name, size) for name, size in source.sizes().items()]
            copying.copy(source, copying.Tree(target), items)
        changes = {
            "data.sources.0.uri": place.sources[0],
            "validation.sources.0.uri": place.held_out[0],
            "run_directory": place.runs,
            f"backends.{backend}": dict(place.settings),
            "compute.offers": [dict(place.offer)],
        } | ({"stages.0.steps": steps} if steps else {})
        sets = [word for path, value in changes.items() for word in ("--set", f"{path}={json.dumps(value)}")]
        recipe = ("quickstart", "--backend", backend, *sets)
        (found,) = isthmus(folder, environment, "compare", *recipe, "--measure")
        (file,) = (folder / "state" / "isthmus" / "measured").glob("*.json")
        written = file.stat().st_mtime
        # A CPU has no price: the command says so with 2, and tells hours all the same.
        told = isthmus(folder, environment, "cost", *recipe, code=2)
        assert told["speed"] == "measured"
        isthmus(folder, environment, "launch", *recipe, "--run-id", "whole", "--yes")
        log = [sys.executable, "-m", "isthmus", "logs", "-f", f"{place.runs}/whole"]
        subprocess.run(log, stdout=subprocess.DEVNULL, cwd=folder, env=environment, check=False)
        events = RunDirectory(f"{place.runs}/whole").events()
        times = {event["type"]: event["time"] for event in reversed(events)}
        assert written < times["started"], "the prediction is older than the run"
        took = times["finished"] - times["started"]
        waiting = sum(line["quantity"] or 0 for line in told["lines"] if line["name"] in ALLOCATION)
        predicted = 3600 * (told["hours"] - waiting / told["nodes"])
        return {
            "predicted_s": round(predicted, 1),
            "took_s": round(took, 1),
            "error": round(predicted / took - 1, 4),
            "interval80_s": [round(3600 * hours, 1) for hours in told["interval80"]["hours"]]
            if isinstance(told.get("interval80"), dict) and "hours" in told["interval80"]
            else None,
            "steps_share": round(found["measured_steps_share"], 4),
            "time_share": round(found["measurement"]["seconds"] / took, 4),
            "step_s": found["measurement"]["stages"][0],
        }
    finally:
        cloud.close()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="azure,sagemaker")
    parser.add_argument("--steps", type=int, help="Of the whole run; default: the recipe's 1500.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    # Short: the hosts make sockets below it.
    with tempfile.TemporaryDirectory(prefix="measure-") as scratch:
        data = make_data(Path(scratch))
        for backend in options.backend.split(","):
            check_installed(backend)
            folder = Path(scratch) / backend
            folder.mkdir()
            results[backend] = one(backend, data, folder, options.steps)
            if not options.json:
                print(f"{backend}: {results[backend]}", flush=True)
    if options.json:
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
