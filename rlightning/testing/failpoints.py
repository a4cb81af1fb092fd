"""Failpoints, for tests; the marks themselves are `rlightning.utils.failpoints.failpoint`."""

from __future__ import annotations

from rlightning.utils.failpoints import (
    EXIT_CODE,
    VARIABLE,
    FailpointError,
    armed,
    failpoint,
    passed,
)

__all__ = ["EXIT_CODE", "VARIABLE", "FailpointError", "armed", "failpoint", "passed"]
