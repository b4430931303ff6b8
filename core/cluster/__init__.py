"""Who am I among which hosts: one small adapter per container contract, named by the launcher."""

from isthmus.core.cluster.adapters import Cluster, ClusterAdapter, find_cluster

__all__ = ["Cluster", "ClusterAdapter", "find_cluster"]
