"""Addresses of servers in tests."""

from __future__ import annotations

import pytest

from rlightning.testing import free_address, ports


def test_nobody_is_given_a_port_that_somebody_else_was_just_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ports, "_PORTS", range(18_000, 18_060))
    monkeypatch.setattr(ports, "_ATTEMPTS", 60)
    given = [free_address() for _ in range(20)]
    assert len(set(given)) == 20
