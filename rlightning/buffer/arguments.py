"""What users give to a buffer, in the forms that it may have; and what they are told of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rlightning.buffer.utils.stored_rows import USE_BYTES
from rlightning.buffer.utils.table import EpisodeTable
from rlightning.errors import ConfigError
from rlightning.latency import LatencyStats
from rlightning.utils.config import BufferConfig

logger = logging.getLogger(__name__)


def resolved(data: Any) -> Any:
    """Returns the result of a future, and anything else as it is."""
    kind = type(data)
    if kind is dict:  # as mostly, and quicker to see
        return data
    if callable(getattr(kind, "result", None)) and callable(getattr(kind, "done", None)):
        return data.result()
    return data


def truncation_flags(truncations: Any, count: int) -> list[bool]:
    """Returns for each of `count` elements whether its episode ends; None: for none.

    Raises:
        TypeError: It is no list.
        ValueError: It has another length.
    """
    if truncations is None:
        return [False] * count
    if not isinstance(truncations, list):
        raise TypeError(f"truncations: expected a list, got {type(truncations).__name__}")
    if len(truncations) != count:
        raise ValueError(f"{len(truncations)} truncations for {count} elements")
    return truncations


def check_config(config: BufferConfig, max_bytes: int) -> None:
    """Checks that a buffer can be as its configuration wants it, in so many bytes.

    Raises:
        ConfigError: It cannot; the message names the key.
    """
    if config.capacity < 1:
        raise ConfigError(f"buffer.capacity: expected at least 1, got {config.capacity}")
    if (needed := config.capacity * USE_BYTES) > max_bytes:
        raise ConfigError(
            f"buffer.capacity: {config.capacity} transitions need {needed} bytes before one is "
            f"stored; buffer.max_bytes allows {max_bytes}"
        )
    refuse_data_dir(config)
    if config.storage.device != "cpu":
        raise ConfigError(
            f"buffer.storage.device: {config.storage.device!r} is not supported, only 'cpu' is"
        )
    check_shards(config)
    for key in ("rate_limiter", "tables"):
        if getattr(config, key):
            raise ConfigError(f"buffer.{key}: only a buffer server has it, not a buffer by itself")
    sampler = config.sampler.type if config.sampler is not None else ""
    if config.sampler is not None and (config.sampler.length or 1) > config.capacity:
        raise ConfigError(
            f"buffer.sampler.length: expected at most buffer.capacity, {config.capacity}, got "
            f"{config.sampler.length}"
        )
    if config.storage.unit == "episode":
        if sampler in ("prioritised", "sequence"):
            raise ConfigError(f"buffer.sampler: '{sampler}' needs storage.unit 'transition'")
        if config.storage.removal != "fifo":
            raise ConfigError(
                f"buffer.storage.removal: '{config.storage.removal}' needs unit 'transition'"
            )
    if config.storage.removal == "priority" and sampler != "prioritised":
        raise ConfigError(
            "buffer.storage.removal: 'priority' needs the sampler 'prioritised', which has "
            f"priorities, got '{sampler}'"
        )


def refuse_data_dir(config: BufferConfig) -> None:
    """Checks that a buffer that is no server's is not expected to outlive its process.

    Raises:
        ConfigError: It is.
    """
    if config.data_dir is not None:
        raise ConfigError("buffer.data_dir: only a buffer server keeps what it holds in a folder")


def check_table(config: BufferConfig) -> None:
    """Checks what a configuration wants of a table beside its buffer.

    Raises:
        ConfigError: It cannot be; the message names the key.
    """
    if config.type == "RolloutBuffer" and config.functions.postprocess_fn is not None:
        raise ConfigError("buffer.functions.postprocess_fn: rollouts are not made of episodes")
    limiter = config.rate_limiter
    if limiter is None:
        return
    for key, size in (("min_size", limiter.min_size), ("queue_size", limiter.queue_size)):
        if size is not None and size > config.capacity:
            raise ConfigError(
                f"buffer.rate_limiter.{key}: expected at most buffer.capacity, {config.capacity}, "
                f"got {size}"
            )
    if limiter.queue_size is None:
        return
    for key, value, needed in (
        ("unit", config.storage.unit, "transition"),
        ("mode", config.storage.mode, "circular"),
        ("removal", config.storage.removal, "fifo"),
    ):
        if value != needed:
            raise ConfigError(f"buffer.storage.{key}: a queue needs '{needed}', got '{value}'")


def check_shards(config: BufferConfig) -> None:
    """Checks that a configuration says which shards there are, and what runs where.

    Raises:
        ConfigError: It does not; the message names the key.
    """
    storage = config.storage
    sharded = storage.type == "sharded"
    if sharded and storage.num_shards is None and not storage.addresses:
        raise ConfigError(
            "buffer.storage.type: 'sharded' needs storage.num_shards, or storage.addresses of "
            "buffer servers"
        )
    for key in ("node_affinity_env", "node_affinity_train"):
        if getattr(config, key) and not (sharded and storage.nodes):
            raise ConfigError(
                f"buffer.{key}: needs storage.type 'sharded', and storage.nodes to say what runs "
                "where"
            )
    if config.node_affinity_train and storage.split != "equal":
        raise ConfigError("buffer.node_affinity_train: needs storage.split 'equal'")


def make_table(
    config: BufferConfig, env_ids: Sequence[str] | None = None, train_workers: int | None = None
) -> EpisodeTable:
    """Returns which env writes to which shard, and which train workers read it.

    Args:
        config: Its section of the configuration.
        env_ids: Ids of the envs that are known.
        train_workers: Their number. Where it cannot be dealt out to the shards equally, each worker
            reads all of them, and the table names none.

    Raises:
        ConfigError: `storage.nodes` do not fit the affinity that is asked for.
    """
    storage = config.storage
    if train_workers is not None and train_workers % storage.shards:
        train_workers = None
    nodes = {
        name: {role: {"ids": getattr(node, role)} for role in ("buffer", "env", "train")}
        for name, node in storage.nodes.items()
    }
    try:
        return EpisodeTable(
            storage.shards,
            env_ids,
            train_workers,
            nodes or None,
            config.node_affinity_env,
            config.node_affinity_train,
        )
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(f"buffer.storage.nodes: {error}") from None


def storage_options(config: BufferConfig, max_bytes: int) -> dict[str, Any]:
    """Returns those arguments of a storage that its configuration decides."""
    storage = config.storage
    return {
        "mode": storage.mode,
        "unit": storage.unit,
        "device": storage.device,
        "auto_truncate_episode": config.auto_truncate_episode,
        "frame_stack": {path: stack.axis for path, stack in storage.frame_stack.items()},
        "removal": storage.removal,
        "compression": storage.compression,
        "columns": config.columns,
        "max_bytes": max_bytes,
    }


def log_durations(who: str, durations: LatencyStats, *, reset: bool) -> None:
    """Logs durations at level DEBUG, and forgets them with `reset`."""
    for name, summary in durations.summary().items():
        logger.debug("%s %s: %s", who, name, summary)
    if reset:
        durations.clear()
