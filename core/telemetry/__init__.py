"""What a node can measure of itself, and the recipe's thresholds over it. No torch, no cloud SDK.

A name is imported when it is first used: checking a recipe needs `unmeasurable` alone, and none of the probes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.core.telemetry.expected import expected_fabric
    from isthmus.core.telemetry.limits import unmeasurable
    from isthmus.core.telemetry.probe import SystemProbe
    from isthmus.core.telemetry.thresholds import Alarm, Thresholds
    from isthmus.core.telemetry.watching import watch

_HOMES = {
    "Alarm": "thresholds",
    "SystemProbe": "probe",
    "Thresholds": "thresholds",
    "expected_fabric": "expected",
    "unmeasurable": "limits",
    "watch": "watching",
}
__all__ = ["Alarm", "SystemProbe", "Thresholds", "expected_fabric", "unmeasurable", "watch"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
