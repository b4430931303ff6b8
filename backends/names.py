"""Names of jobs: chosen by us before a job exists, in the alphabet and length of its cloud."""

from __future__ import annotations

import re
from hashlib import sha256

SAGEMAKER_LIMIT = 63
SAGEMAKER_ALLOWED = "a-zA-Z0-9-"
AZURE_LIMIT = 255
AZURE_ALLOWED = "a-zA-Z0-9_-"


def job_name(run_id: str, attempt: int, *, limit: int, allowed: str = SAGEMAKER_ALLOWED) -> str:
    """`<run id>-<attempt>`, the same for the same run and attempt, so that a submission can be repeated.

    Args:
        run_id: what of it is cut or replaced is made unique by six digits of its hash.
        attempt: from 1; two digits or more.
        limit: characters the cloud takes.
        allowed: the characters it takes, as the inside of a regular expression's brackets.
    """
    suffix = f"-{attempt:02d}"
    name = re.sub(rf"[^{allowed}]+", "-", run_id).strip("-_")
    if name != run_id or len(name) + len(suffix) > limit:
        suffix = f"-{sha256(run_id.encode()).hexdigest()[:6]}{suffix}"
        name = name[: limit - len(suffix)].rstrip("-_") or "run"
    return name + suffix
