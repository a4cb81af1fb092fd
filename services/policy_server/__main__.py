"""Runs the policy server: `python -m rlightning.services.policy_server --config FILE`."""

from __future__ import annotations

from rlightning.cluster.service_main import service_main

from .servicer import PolicyService


def main() -> None:
    """Runs until a signal, then exits the process."""
    service_main("policy_server", PolicyService)


if __name__ == "__main__":
    main()
