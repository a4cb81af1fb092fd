"""Documented place of the preprocess functions."""

from __future__ import annotations

from rlightning.buffer.utils.utils import (
    default_env_ret_preprocess_fn,
    default_obs_preprocessor,
    default_policy_resp_preprocess_fn,
    default_preprocess_fn,
    default_reward_preprocessor,
)

__all__ = [
    "default_env_ret_preprocess_fn",
    "default_obs_preprocessor",
    "default_policy_resp_preprocess_fn",
    "default_preprocess_fn",
    "default_reward_preprocessor",
]
