"""The run directory: the only code that knows its layout. Small objects, each written whole."""

from isthmus.storage.rundir.directory import RunDirectory
from isthmus.storage.rundir.lease import Lease
from isthmus.storage.rundir.metrics import MetricsWriter

__all__ = ["Lease", "MetricsWriter", "RunDirectory"]
