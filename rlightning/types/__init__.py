"""The data that travels: env returns, policy responses, batches. Nothing here imports torch."""

from __future__ import annotations

from rlightning.types.batched_data import BatchedData, UnknownIdError
from rlightning.types.env_rets import (
    ActionSource,
    EnvRet,
    MultiAgentEnvRet,
    Processed_EnvRet_fields,
)
from rlightning.types.metadata import EnvMeta
from rlightning.types.modes import Mode, Purpose
from rlightning.types.policy_response import MultiAgentPolicyResponse, PolicyResponse

__all__ = [
    "ActionSource",
    "BatchedData",
    "EnvMeta",
    "EnvRet",
    "Mode",
    "MultiAgentEnvRet",
    "MultiAgentPolicyResponse",
    "PolicyResponse",
    "Processed_EnvRet_fields",
    "Purpose",
    "UnknownIdError",
]
