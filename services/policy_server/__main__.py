"""Runs the policy server: `python -m rlightning.services.policy_server --config FILE`."""

from __future__ import annotations

from rlightning.cluster.guard import require_policy_server
from rlightning.cluster.service_main import service_main
from rlightning.utils.config import MainConfig

from .servicer import PolicyService


def main() -> None:
    """Runs until a signal, then exits the process."""
    service_main("policy_server", _make_service)


def _make_service(config: MainConfig) -> PolicyService:
    require_policy_server()
    return PolicyService(config)


if __name__ == "__main__":
    main()
