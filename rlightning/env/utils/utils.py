"""What envs share."""

from __future__ import annotations

from typing import Any

from rlightning.types import PolicyResponse


def default_env_preprocess_fn(policy_resp: PolicyResponse) -> Any:
    """Returns the action of a response as it is."""
    return policy_resp.action
