"""Starts the services of a config, and trains with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlightning.utils.lazy import lazy_names

if TYPE_CHECKING:
    from rlightning.cluster.local_cluster import LocalCluster

__all__ = ["LocalCluster"]

# The services' command line needs this package, but not the clients.
__getattr__ = lazy_names(__name__, {"LocalCluster": "local_cluster"})
