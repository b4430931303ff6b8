"""`isthmus rehearse`, whole: an emulated cloud, two containers that train, an eviction, a machine that dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isthmus.storage.rundir import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GRACE_S = {"azure": 30, "sagemaker": 120}


def rehearse(folder: Path, *words: str) -> dict[str, Any]:
    """The report of a rehearsal that is good."""
    for module in ("moto", "cryptography", "azure.ai.ml"):
        pytest.importorskip(module, reason="pip install 'isthmus[rehearse,azure]'")
    done = subprocess.run(
        [sys.executable, "-m", "isthmus", "rehearse", *words, "--json"],
        cwd=folder,
        # What a developer has in their environment must lead nowhere.
        env={**os.environ, "AWS_PROFILE": "nobody", "AZURE_CLIENT_ID": "nobody", "AZURE_TENANT_ID": "nobody"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Azurite" in done.stderr and "error:" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["ok"]
    assert (report["missing"], report["repeated"], report["unequal"]) == ([], [], [])
    return report


@pytest.mark.parametrize("backend", sorted(GRACE_S))
def test_an_eviction_is_survived_within_the_grace(tmp_path: Path, backend: str) -> None:
    """Slow: two attempts in emulated containers."""
    report = rehearse(tmp_path, "sdxl-progressive", "--backend", backend, "--keep", "kept")
    (struck,) = report["struck"]
    assert (struck["kind"], struck["step"]) == ("evict", 8)
    assert struck["checkpoint"] in (8, 9)
    assert struck["saved_s"] < GRACE_S[backend]
    assert report["attempts"] == 2
    # SageMaker starts the same job again; on Azure ML the supervisor sends the next one.
    assert len(report["jobs"]) == (1 if backend == "sagemaker" else 2)
    run = RunDirectory(report["kept"])
    assert [row["step"] for row in run.read_metrics("train", all_attempts=True)] == list(range(1, 25))
    print(f"{backend}: {report['seconds']} s; {struck}")


@pytest.mark.parametrize(("backend", "node"), [("azure", 0), ("sagemaker", 1)])
def test_a_machine_that_dies(tmp_path: Path, backend: str, node: int) -> None:
    """Slow: two attempts; the second waits for the lease of a node 0 that died."""
    words = ("sd3-medium", "--backend", backend, "--kill-node", str(node))
    report = rehearse(tmp_path, *words)
    (struck,) = report["struck"]
    assert (struck["kind"], struck["node"], struck["step"]) == ("kill-node", node, 12)
    # That of step 10 may have been on its way.
    assert struck["checkpoint"] in (5, 10)
    assert struck["redone"] == 12 - struck["checkpoint"]
    print(f"{backend}: {report['seconds']} s; {struck}")
