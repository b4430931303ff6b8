"""Metrics that SageMaker reads out of the log: a regular expression for each figure of the trainer's lines.

The lines are those of `core/train/progress.py` and `core/train/loop.py` where there is no terminal; a test prints real ones
and matches them. The service searches each line and takes the first group as a number.
"""

from __future__ import annotations

NUMBER = r"([-+]?[0-9]+\.?[0-9]*(?:e[-+]?[0-9]+)?)"
_STEP = r"step [0-9]+/[0-9]+  stage \S+  "
_SHARE = _STEP + r".*  {name} {number} %"

METRICS: dict[str, str] = {
    "train:step": r"step ([0-9]+)/[0-9]+  stage ",
    "train:loss": _STEP + "loss " + NUMBER,
    "train:samples_per_s": _STEP + r"loss \S+  " + NUMBER + " samples/s",
    "train:mfu_percent": _SHARE.format(name="MFU", number=NUMBER),
    "train:data_wait_percent": _SHARE.format(name="data", number=NUMBER),
    "train:exchange_percent": _SHARE.format(name="exchange", number=NUMBER),
    "validation:loss": r"validation at step [0-9]+: loss " + NUMBER,
    "validation:step": r"validation at step ([0-9]+): loss ",
}
EFA_NICS = "fabric:efa_nics"
EFA = {EFA_NICS: r"[Ss]elected [Pp]rovider is efa.*found ([0-9]+) nics"}
"""What aws-ofi-nccl says at the start; absent when NCCL talks over sockets."""


def definitions(*, efa: bool) -> list[dict[str, str]]:
    """`MetricDefinitions` of a request."""
    wanted = METRICS | (EFA if efa else {})
    return [{"Name": name, "Regex": regex} for name, regex in wanted.items()]
