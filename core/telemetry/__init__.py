"""What a node can measure of itself, and the recipe's thresholds over it. No torch, no cloud SDK."""

from isthmus.core.telemetry.expected import expected_fabric
from isthmus.core.telemetry.limits import unmeasurable
from isthmus.core.telemetry.probe import SystemProbe
from isthmus.core.telemetry.thresholds import Alarm, Thresholds
from isthmus.core.telemetry.watch import watch

__all__ = ["Alarm", "SystemProbe", "Thresholds", "expected_fabric", "unmeasurable", "watch"]
