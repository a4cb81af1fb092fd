"""A page that shows how a cluster fares, served while it runs.

`view` makes of a snapshot what the page shows, `feed` keeps it for those who come late, `server`
serves it, and `page/` is what a browser gets.
"""

from __future__ import annotations

from rlightning.cluster.dashboard.dashboard import Dashboard, shown

__all__ = ["Dashboard", "shown"]
