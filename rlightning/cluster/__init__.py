"""Starts the services of a config, and trains with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.cluster.local_cluster import LocalCluster

__all__ = ["LocalCluster"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the services' command line needs this package, but not the clients.
    if name != "LocalCluster":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlightning.cluster.local_cluster import LocalCluster

    return LocalCluster
