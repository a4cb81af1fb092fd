"""EnvRet to and from its message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rlightning.errors import CodecError
from rlightning.types.env_rets import ActionSource, EnvRet, MultiAgentEnvRet
from rlightning.v1 import env_ret_pb2, tensor_pb2
from rlightning.wire.fields import set_int, set_text
from rlightning.wire.frame import DEFAULT_LIMITS, Limits, Reader, Writer
from rlightning.wire.paths import under
from rlightning.wire.splice import Buffer
from rlightning.wire.value import fill_value, read_mapping, read_value

_ValueField: TypeAlias = Literal["observation", "last_reward", "last_terminated", "last_truncated"]

# Keys of `info` that are fields of the message.
_FINAL = ("final_rows", "final_observation", "final_info")
_SOURCES = frozenset(ActionSource)
# What is absent has its default; the observation never is.
_VALUES: tuple[tuple[_ValueField, Any], ...] = (
    ("observation", None),
    ("last_reward", 0.0),
    ("last_terminated", False),
    ("last_truncated", False),
)


def encode_env_ret(env_ret: EnvRet) -> bytes:
    """Returns the encoded message of an EnvRet; see `fill_env_ret`."""
    w = Writer()
    pb = env_ret_pb2.EnvRet()
    fill_env_ret(pb, env_ret, w)
    return w.finish(pb)


def decode_env_ret(data: Buffer, limits: Limits = DEFAULT_LIMITS) -> EnvRet:
    """Returns the EnvRet of an encoded message; see `read_env_ret`."""
    r = Reader(env_ret_pb2.EnvRet, data, limits=limits)
    return read_env_ret(r.message, r)


def fill_env_ret(pb: env_ret_pb2.EnvRet, env_ret: EnvRet, w: Writer) -> None:
    """Writes an EnvRet into its empty message.

    Args:
        pb: The message to fill.
        env_ret: What to send; nothing of it may change before `w.finish`.
        w: The writer of the whole message.

    Raises:
        CodecError: Something in it cannot be sent; the path says where.
    """
    fill_observation(pb, env_ret, w, episodes=True)
    info: Mapping[str, Any] = env_ret.info
    if info and "final_rows" in info:
        info = _fill_final(pb, info, w)
    if info:
        _fill_mapping(pb.info, info, "info", w)
    if env_ret._extra:
        _fill_mapping(pb.extra, env_ret._extra, "extra", w)
        _check_extra(env_ret)
    if env_ret.executed_action is not None:
        _fill_field(pb.executed_action, env_ret.executed_action, "executed_action", w)
    if env_ret.answered_seq:
        set_int(pb, "answered_seq", env_ret.answered_seq)
    if env_ret.chunk_index:
        set_int(pb, "chunk_index", env_ret.chunk_index)
    if env_ret.ts_observed_ns:
        set_int(pb, "ts_observed_ns", env_ret.ts_observed_ns)
    if env_ret.step is not None:
        _extend(pb.step, env_ret.step, "step")
    if env_ret.action_source is not None:
        _extend(pb.action_source, env_ret.action_source, "action_source")


def fill_observation(
    pb: env_ret_pb2.EnvRet, env_ret: EnvRet, w: Writer, *, episodes: bool = False
) -> None:
    """Writes what a policy gets of an EnvRet into its empty message: what else there is, it drops.

    Args:
        pb: The message to fill.
        env_ret: Of whose rows observation, reward and flags are sent; as for `fill_env_ret`.
        w: The writer of the whole message.
        episodes: Whether to say which episodes they belong to, as a policy that keeps state needs.

    Raises:
        CodecError: As `fill_env_ret`.
    """
    set_text(pb, "env_id", env_ret.env_id)
    _fill_field(pb.observation, env_ret.observation, "observation", w)
    _fill_field(pb.last_reward, env_ret.last_reward, "last_reward", w)
    _fill_field(pb.last_terminated, env_ret.last_terminated, "last_terminated", w)
    _fill_field(pb.last_truncated, env_ret.last_truncated, "last_truncated", w)
    set_int(pb, "ts_env_sent_ns", env_ret.ts_env_sent_ns)
    if isinstance(env_ret, MultiAgentEnvRet):
        pb.multi_agent = True
    if episodes and env_ret.episode_id is not None:
        _extend(pb.episode_id, env_ret.episode_id, "episode_id")
    if env_ret.rows is not None:
        _extend(pb.rows, env_ret.rows, "rows")


def _fill_field(pb: tensor_pb2.Value, value: Any, name: str, w: Writer) -> None:
    try:
        fill_value(pb, value, w)
    except CodecError as error:
        under(error, name)
        raise


def _fill_mapping(pb: tensor_pb2.Value, value: Any, name: str, w: Writer) -> None:
    if not isinstance(value, Mapping):
        raise CodecError(f"expected a mapping, got a {type(value).__name__}", path=name)
    _fill_field(pb, value, name, w)


def _fill_final(pb: env_ret_pb2.EnvRet, info: Mapping[str, Any], w: Writer) -> Mapping[str, Any]:
    """Writes what `info` says of ended rows into its own fields; returns the rest of `info`."""
    if np.size(info["final_rows"]):
        _extend(pb.final_rows, info["final_rows"], "final_rows")
        for name in _FINAL[1:]:
            if name in info:
                _fill_field(getattr(pb, name), info[name], name, w)
    return _without_final(info)


def _without_final(info: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in info.items() if key not in _FINAL}


def _check_extra(env_ret: EnvRet) -> None:
    """Refuses what nobody could tell from a field any more once it is stored."""
    if not isinstance(env_ret._extra, Mapping):
        return  # which `_fill_mapping` says
    clash = sorted(set(env_ret.fields()).intersection(env_ret._extra))
    if clash:
        raise CodecError(f"fields of EnvRet have these names: {', '.join(clash)}", path="extra")


def _extend(field: Any, values: Any, name: str) -> None:
    """Writes integers into a repeated field; one integer stands for an array of one."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu" or array.ndim > 1:
        raise CodecError(
            f"expected integers with one axis, got {array.dtype} of shape {list(array.shape)}",
            path=name,
        )
    try:
        field.extend(array.reshape(-1).tolist())
    except ValueError as error:
        raise CodecError(str(error), path=name) from error


def read_env_ret(pb: env_ret_pb2.EnvRet, r: Reader[Any]) -> EnvRet:
    """Reads an EnvRet.

    Args:
        pb: The message, a part of `r.message`.
        r: The reader of the whole message.

    Returns:
        The EnvRet, or a MultiAgentEnvRet; arrays in its values are read-only, see `read_tensor`.

    Raises:
        CodecError: Something in it is not valid or passes a limit; the path says where.
    """
    if not pb.HasField("observation"):
        raise CodecError("no value", path="observation")
    values = []
    name = ""
    try:
        for name, default in _VALUES:
            values.append(read_value(getattr(pb, name), r) if pb.HasField(name) else default)
    except CodecError as error:
        under(error, name)
        raise
    observation, reward, terminated, truncated = values
    kind = MultiAgentEnvRet if pb.multi_agent else EnvRet
    env_ret = kind(
        pb.env_id,
        observation,
        reward,
        terminated,
        truncated,
        read_mapping(pb.info, "info", r) if pb.HasField("info") else {},
        read_mapping(pb.extra, "extra", r) if pb.HasField("extra") else {},
        pb.ts_env_sent_ns,
    )
    if env_ret._extra:
        _check_extra(env_ret)
    if pb.HasField("executed_action"):
        env_ret.executed_action = _read_field(pb.executed_action, "executed_action", r)
    env_ret.answered_seq = pb.answered_seq
    env_ret.chunk_index = pb.chunk_index
    env_ret.ts_observed_ns = pb.ts_observed_ns
    _read_rows(pb, env_ret)
    if pb.final_rows:
        _read_final(pb, env_ret, r)
    elif pb.HasField("final_observation") or pb.HasField("final_info"):
        raise CodecError("no row ended, but a final observation or info came", path="final_rows")
    return env_ret


def _read_field(pb: tensor_pb2.Value, name: str, r: Reader[Any]) -> Any:
    try:
        return read_value(pb, r)
    except CodecError as error:
        under(error, name)
        raise


def _read_rows(pb: env_ret_pb2.EnvRet, env_ret: EnvRet) -> None:
    """Reads the numbers that come one per row, which must agree on how many rows there are."""
    counts: dict[str, int] = {}
    if count := len(pb.rows):
        env_ret.rows = _ascending(pb.rows, "rows")
        counts["rows"] = count
    if count := len(pb.episode_id):
        env_ret.episode_id = np.array(pb.episode_id, np.int64)
        counts["episode_id"] = count
    if count := len(pb.step):
        env_ret.step = np.array(pb.step, np.int64)
        counts["step"] = count
    if count := len(pb.action_source):
        if not _SOURCES.issuperset(pb.action_source):
            raise CodecError("an unknown source", path="action_source")
        env_ret.action_source = np.fromiter(pb.action_source, np.int8, count)
        if count > 1:  # one stands for all rows
            counts["action_source"] = count
    if len(set(counts.values())) > 1:
        raise CodecError(f"numbers of rows differ: {counts}")


def _ascending(values: Sequence[int], name: str) -> npt.NDArray[np.int32]:
    array = np.fromiter(values, np.int32, len(values))
    if array[0] < 0 or (array[1:] <= array[:-1]).any():
        raise CodecError("expected ascending row numbers from 0", path=name)
    return array


def _read_final(pb: env_ret_pb2.EnvRet, env_ret: EnvRet, r: Reader[Any]) -> None:
    """Puts what came of ended rows into `info`."""
    final_rows = _ascending(pb.final_rows, "final_rows")
    count = len(pb.rows) or len(pb.episode_id)
    if count and final_rows[-1] >= count:
        raise CodecError(f"row {final_rows[-1]} of {count}", path="final_rows")
    info = env_ret.info
    clash = [name for name in _FINAL if name in info]
    if clash:
        raise CodecError(f"{clash} are fields of the message", path="info")
    info["final_rows"] = final_rows
    if pb.HasField("final_observation"):
        info["final_observation"] = _read_field(pb.final_observation, "final_observation", r)
    if pb.HasField("final_info"):
        info["final_info"] = _read_field(pb.final_info, "final_info", r)
