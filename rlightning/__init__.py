"""RLightning over gRPC: collects RL experience over the network and learns from it."""

from __future__ import annotations

from rlightning._version import __version__

__all__ = ["__version__"]
