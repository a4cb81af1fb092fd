"""Brings an env of yours into a cluster over the network; needs no more than the base install."""

from __future__ import annotations

from rlightning.env.remote_env.env_client import AttachStatus, RemoteEnvClient
from rlightning.env.remote_env.paced_run import ControlStatus

__all__ = ["AttachStatus", "ControlStatus", "RemoteEnvClient"]
