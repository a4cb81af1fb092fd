"""Runs the policy server: `python -m rlightning.services.policy_server --config FILE`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlightning.cluster.interrupt import one_line_interrupt

if TYPE_CHECKING:
    from rlightning.utils.config import MainConfig


def main() -> None:
    """Runs until a signal, then exits the process."""
    with one_line_interrupt():
        from rlightning.cluster.guard import require_policy_server
        from rlightning.cluster.service_main import service_main

        from .servicer import PolicyService

        def make_service(config: MainConfig) -> PolicyService:
            require_policy_server()
            return PolicyService(config)

        service_main("policy_server", make_service)


if __name__ == "__main__":
    main()
