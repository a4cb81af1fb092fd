"""The envs that a buffer was told of, and what is known of those whose data comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlightning.types import EnvMeta


def declared(
    env_meta_list: Sequence[EnvMeta | Mapping[str, Any]] | None,
) -> Mapping[str, EnvMeta] | None:
    """Returns the envs whose data may come, by id; None for any; see `DataBuffer.init`."""
    if env_meta_list is None:
        return None
    metas = [meta if isinstance(meta, EnvMeta) else EnvMeta(**meta) for meta in env_meta_list]
    return {meta.env_id or "": meta for meta in metas}


def meta_of(metas: Mapping[str, EnvMeta] | None, env_id: str) -> EnvMeta:
    """Returns what is known of an env; a row's id `env/row` stands for a lone env.

    Args:
        metas: As of `declared`.
        env_id: Id of the env, or of a row.

    Raises:
        KeyError: It is none of them.
    """
    if metas is None:
        return EnvMeta(env_id)
    if env_id in metas:
        return metas[env_id]
    parent_id, slash, _ = env_id.rpartition("/")
    parent = metas.get(parent_id) if slash else None
    if parent is None:
        raise KeyError(f"env {env_id!r} is none of {sorted(metas)}")
    return replace(parent, env_id=env_id, num_envs=1)
