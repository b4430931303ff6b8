"""An Azure ML command job with the PyTorch distribution and one process a node: everything from variables.

Contract: MASTER_ADDR, MASTER_PORT, NODE_RANK and WORLD_SIZE as Azure ML sets them for `distribution: pytorch` with
`process_count_per_instance: 1`; then RANK is the node's rank, too. AZUREML_NODE_COUNT counts the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.core.cluster.adapters import Cluster
from isthmus.core.cluster.sagemaker import port_of
from isthmus.errors import UsageError

GRACE = 30.0
"""Seconds that a preempted low-priority node has, more or less: nobody promises them."""
PORT = 6105


def cluster(nodes: int, environ: Mapping[str, str]) -> Cluster:
    """This node's place among the job's. Raises UsageError when there are others than the recipe asks for."""
    if int(environ.get("LOCAL_WORLD_SIZE") or 1) > 1:
        raise UsageError(
            f"Azure ML started {environ['LOCAL_WORLD_SIZE']} processes on this node, one is to start the others",
            hint="distribution.process_count_per_instance: 1",
        )
    count = _number(environ, "AZUREML_NODE_COUNT", "WORLD_SIZE")
    if (1 if count is None else count) != nodes:
        raise UsageError(
            f"the job has {count or 1} nodes, the recipe asks for {nodes}",
            hint="compute.nodes is what the job's resources.instance_count must be",
        )
    if nodes == 1:
        return Cluster(
            hosts=("127.0.0.1",), node_rank=0, master_addr="127.0.0.1", master_port=None, grace=GRACE
        )
    rank, master = _number(environ, "NODE_RANK", "RANK"), environ.get("MASTER_ADDR")
    if rank is None or not master:
        missing = "MASTER_ADDR" if not master else "NODE_RANK"
        raise UsageError(
            f"{missing} is not set, so this node does not know its place", hint="distribution.type: pytorch"
        )
    if rank >= nodes:
        raise UsageError(f"NODE_RANK is {rank}, of {nodes} nodes")
    # The others' names are nobody's business here: they find each other through node 0.
    hosts = (master, *(f"node-{number}" for number in range(1, nodes)))
    return Cluster(
        hosts=hosts,
        node_rank=rank,
        master_addr=master,
        master_port=port_of(environ, PORT),
        grace=GRACE,
    )


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of the variables that is set. Raises UsageError when it is no number."""
    for name in names:
        text = environ.get(name)
        if text:
            if not text.isdecimal():
                raise UsageError(f"{text!r} is no number", where=name)
            return int(text)
    return None
