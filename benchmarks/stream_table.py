"""The result of `stream.py` as text."""

from __future__ import annotations

from typing import Any


def table(result: dict[str, Any]) -> str:
    """Medians by case and workers, then the ratios with their targets."""
    lines = [
        _line("reader", "workers", "samples/s", "over all", "CPU s/GB", "MB (PSS)", "first s", "at 90 % s")
    ]
    flat = [
        (name, case, workers, values)
        for name, case in result["cases"].items()
        for workers, values in case["workers"].items()
    ]
    flat.sort(key=lambda row: -row[3].get("samples_per_s", 0))
    for _name, case, workers, values in flat:
        title = case["title"] + (" *" if case["counted"] else "")
        if "samples_per_s" not in values:
            lines.append(f"{title:<36}{workers:>8}  {values.get('error', '')[:60]}")
            continue
        lines.append(
            _line(
                title,
                workers,
                f"{values['samples_per_s']:,.0f}",
                f"{values['samples_per_s_over_all']:,.0f}",
                f"{values['cpu_s_per_gb']:.2f}",
                f"{values['peak_pss_bytes'] / 1e6:,.0f}" if "peak_pss_bytes" in values else "",
                f"{values.get('cold_start_s', values['first_batch_s']):.3f}",
                f"{values['resumed_start_s']:.3f}" if "resumed_start_s" in values else "",
            )
        )
        if "error" in values:
            lines.append(f"  {values['error'][:90]}")
    lines.append("* shuffles rows and yields torch batches: counted as a peer")
    far = result.get("remote", {})
    if "skipped" in far:
        lines += ["", f"over HTTP: left out, {far['skipped']}"]
    for kind in ("delayed", "plain"):
        if kind in far:
            lines += ["", *_remote(kind, far[kind])]
    if "wait_fraction" in far.get("paced", {}):
        lines.append(
            f"paced at 71 images/s, delayed: {100 * far['paced']['wait_fraction']:.2f} % of the time waited"
        )
    lines.append("")
    for name, target in result["targets"].items():
        verdict = "holds" if target["holds"] else "MISSED"
        lines.append(f"{name:<36}{target['value']:>14,.3f}  target {target['target']}: {verdict}")
    if "best_peer" in result:
        lines.append(f"best peer: {result['best_peer']}")
    return "\n".join(lines)


def _remote(kind: str, part: dict[str, Any]) -> list[str]:
    delay = "20 ms to the first byte, 80 MB/s a connection" if kind == "delayed" else "no delay"
    lines = [f"over HTTP, {delay}, {part['depth']} reads in flight:"]
    for name, values in sorted(part["readers"].items(), key=lambda item: -item[1]["samples_per_s"]):
        lines.append(
            f"  {name:<16}{values['samples_per_s']:>8,.0f} samples/s {values['mb_per_s']:>7,.0f} MB/s "
            f"{values['cpu_s_per_gb']:.2f} CPU s/GB, first {values['first_batch_s']:.2f} s"
        )
    for name, error in part["errors"].items():
        lines.append(f"  {name}: {error[:90]}")
    for name, values in part.get("peers", {}).items():
        if "error" in values:
            lines.append(f"  {name}: {values['error'][:90]}")
        else:
            lines.append(
                f"  {name:<16}{values['samples_per_s_over_all']:>8,.0f} samples/s over all, "
                f"first {values['first_batch_s']:.2f} s"
            )
    return lines


def _line(title: str, *columns: str) -> str:
    return f"{title:<36}" + "".join(f"{column:>{8 if at == 0 else 11}}" for at, column in enumerate(columns))
