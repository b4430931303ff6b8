"""One node: this machine."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.core.cluster.adapters import Cluster
from isthmus.errors import UsageError

GRACE = 30.0


def cluster(nodes: int, environ: Mapping[str, str]) -> Cluster:
    """The cluster of one host. Raises UsageError for more."""
    if nodes != 1:
        raise UsageError(
            f"the local cluster has one node, the recipe asks for {nodes}", hint="compute.nodes: 1"
        )
    return Cluster(hosts=("127.0.0.1",), node_rank=0, master_addr="127.0.0.1", master_port=None, grace=GRACE)
