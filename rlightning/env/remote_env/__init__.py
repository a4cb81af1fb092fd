"""Brings an env of yours into a cluster over the network; needs no more than the base install."""

from __future__ import annotations

from rlightning.env.remote_env.client import AttachStatus, RemoteEnvClient

__all__ = ["AttachStatus", "RemoteEnvClient"]
