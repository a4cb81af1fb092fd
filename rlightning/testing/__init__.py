"""What tests of this library, and of what is built on it, are made with."""

from __future__ import annotations

from rlightning.testing.failpoints import FailpointError, armed, failpoint
from rlightning.testing.fakes import FakeBuffer, FakeEnv, FakePolicy
from rlightning.testing.ports import free_address
from rlightning.testing.processes import ServerProcess
from rlightning.testing.proxy import FaultProxy
from rlightning.testing.waiting import assert_eventually, wait_until

__all__ = [
    "FailpointError",
    "FakeBuffer",
    "FakeEnv",
    "FakePolicy",
    "FaultProxy",
    "ServerProcess",
    "armed",
    "assert_eventually",
    "failpoint",
    "free_address",
    "wait_until",
]
