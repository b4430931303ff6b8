"""Draws the result of `stream.py` as a PNG: `python benchmarks/stream_chart.py RESULT.json OUT.png` where matplotlib is."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OURS, LIMIT, PEER, ASIDE, TEXT = "#c2410c", "#475569", "#64a0c8", "#cbd5e1", "#1f2937"
FAR_NAMES = {
    "isthmus": "isthmus",
    "obstore": "obstore, ranges only",
    "boto3": "boto3, ranges only",
    "s3fs": "s3fs, ranges only",
    "fsspec_http": "fsspec http, ranges only",
    "mds": "MosaicML streaming, MDS",
    "hf_parquet": "HF datasets, parquet",
}


def draw(result: dict[str, Any], path: Path, cache: Path) -> None:
    """Draws in an environment that has matplotlib, which is made when it is not there."""
    from peers.venvs import python_of

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(result, file)
        file.flush()
        command = [python_of("chart", cache), __file__, file.name, str(path)]
        subprocess.run(command, check=True, timeout=300)


def near(result: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Label, samples a second and colour of each reader from disk, at its best worker count, fastest last."""
    bars = []
    for name, case in result["cases"].items():
        rates = {
            workers: values["samples_per_s"]
            for workers, values in case["workers"].items()
            if "samples_per_s" in values
        }
        if not rates:
            continue
        workers = max(rates, key=lambda key: rates[key])
        if name.startswith("ours"):
            colour = OURS
        elif name.startswith("readinto"):
            colour = LIMIT
        else:
            colour = PEER if case["counted"] else ASIDE
        words = case["title"] + (f", {workers} worker{'s' * (workers != '1')}" if workers != "0" else "")
        bars.append((words, rates[workers], colour))
    return sorted(bars, key=lambda bar: bar[1])


def far(part: dict[str, Any]) -> list[tuple[str, float, str]]:
    """The same over HTTP."""
    rates = {name: values["samples_per_s"] for name, values in part["readers"].items()}
    for name, values in part.get("peers", {}).items():
        if "samples_per_s_over_all" in values:
            rates[name] = values["samples_per_s_over_all"]
    bars = []
    for name, rate in rates.items():
        if name in FAR_NAMES:
            colour = OURS if name == "isthmus" else PEER if name in part.get("peers", {}) else LIMIT
            bars.append((FAR_NAMES[name], rate, colour))
    return sorted(bars, key=lambda bar: bar[1])


def plot(result: dict[str, Any], path: Path) -> None:
    """One panel for the disk and one for each store."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"font.size": 9, "text.color": TEXT, "axes.labelcolor": TEXT, "ytick.color": TEXT}
    panels = [("From a page-cached disk", near(result))]
    for kind, title in (
        ("delayed", "Over HTTP: 20 ms to the first byte, 80 MB/s a connection"),
        ("plain", "Over HTTP, no delay, server on the same two cores"),
    ):
        part = result.get("remote", {}).get(kind)
        if part:
            panels.append((f"{title}; {part['depth']} reads in flight", far(part)))
    heights = [len(bars) + 1.2 for _, bars in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(7.6, 0.235 * sum(heights) + 0.9), height_ratios=heights, squeeze=False
    )
    for (title, bars), axis in zip(panels, axes[:, 0], strict=True):
        values = [value for _, value, _ in bars]
        axis.barh(range(len(bars)), values, color=[colour for *_, colour in bars], height=0.72)
        axis.set_yticks(range(len(bars)), [words for words, *_ in bars])
        for at, value in enumerate(values):
            axis.text(value + 0.01 * max(values), at, f"{value:,.0f}", va="center", fontsize=8)
        axis.set_xlim(0, 1.12 * max(values))
        axis.set_ylim(-0.6, len(bars) - 0.4)
        axis.set_xticks([])
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.spines["left"].set_color("#9ca3af")
        axis.annotate(
            title,
            (0.01, 1.03),
            xycoords=("figure fraction", "axes fraction"),
            fontsize=9.5,
            fontweight="bold",
        )
    kilobytes = result["row_bytes"] / 1000
    machine = result["machine"]
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=colour)
        for colour in ((OURS, LIMIT, PEER, ASIDE) if len(panels[0][1]) > 3 else (OURS, LIMIT))
    ]
    names = ["isthmus", "bytes alone", "peer, shuffles rows", "shown, not counted"]
    figure.legend(
        handles,
        names[: len(handles)],
        loc="lower right",
        ncols=4,
        frameon=False,
        fontsize=8,
        bbox_to_anchor=(1, 0.016),
        handlelength=1,
        columnspacing=1.2,
    )
    figure.suptitle(
        f"Samples a second, rows of {kilobytes:.0f} KB, batches of {result['batch']}, medians of {result['repeats']}",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
    )
    figure.text(
        0.01,
        0.006,
        f"{machine['processor']}, {machine['cores']} cores; benchmarks/stream.py",
        fontsize=7.5,
        color="#6b7280",
    )
    figure.tight_layout(rect=(0, 0.035, 1, 1))
    figure.savefig(path, dpi=100, facecolor="white")


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
