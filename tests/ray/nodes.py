"""A Ray cluster of two nodes on this machine, each with processes of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NODE = {"num_cpus": 4, "object_store_memory": 80 * 2**20}


@contextmanager
def two_nodes() -> Iterator[tuple[Any, Any]]:
    """Yields the cluster, which this process is connected to, and the node that may be removed."""
    # Read when Ray is imported: a busy machine needs longer than 30 s, and nobody is told of our tests.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(**_NODE, include_dashboard=False)
        other = cluster.add_node(**_NODE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="WARNING")
        yield cluster, other
    finally:
        ray.shutdown()
        cluster.shutdown()


def bundles_of_services() -> list[dict[str, float]]:
    """Returns what each bundle of services reserves."""
    import ray

    return [
        {"CPU": bundle["CPU"]}
        for group in ray.util.placement_group_table().values()
        if group["state"] == "CREATED"
        for _, bundle in sorted(group["bundles"].items())
    ]


def nodes_of_services() -> set[str]:
    """Returns the nodes that services are placed on."""
    import ray

    return {
        node
        for group in ray.util.placement_group_table().values()
        if group["state"] == "CREATED"
        for node in group["bundles_to_node_id"].values()
    }
