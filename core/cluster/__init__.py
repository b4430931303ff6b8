"""Who am I among which hosts: one small adapter per container contract, named by the launcher."""

from isthmus.core.cluster.adapters import Cluster, ClusterAdapter, failure_file, find_cluster

__all__ = ["Cluster", "ClusterAdapter", "failure_file", "find_cluster"]
