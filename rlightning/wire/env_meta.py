"""EnvMeta to and from its message."""

from __future__ import annotations

from typing import Any

from rlightning.errors import CodecError
from rlightning.types.metadata import EnvMeta
from rlightning.v1 import space_pb2
from rlightning.wire.fields import not_unicode, set_int, set_text
from rlightning.wire.frame import DEFAULT_LIMITS, Limits, Reader, Writer
from rlightning.wire.paths import under
from rlightning.wire.space import fill_dict, fill_space, read_dict, read_space
from rlightning.wire.splice import Buffer

# What Python keeps for a text, but its characters.
_TEXT_BYTES = 64


def encode_env_meta(meta: EnvMeta) -> bytes:
    """Returns the encoded message of an EnvMeta; see `fill_env_meta`."""
    w = Writer()
    pb = space_pb2.EnvMeta()
    fill_env_meta(pb, meta, w)
    return w.finish(pb)


def decode_env_meta(data: Buffer, limits: Limits = DEFAULT_LIMITS) -> EnvMeta:
    """Returns the EnvMeta of an encoded message; see `read_env_meta`."""
    r = Reader(space_pb2.EnvMeta, data, limits=limits)
    return read_env_meta(r.message, r)


def fill_env_meta(pb: space_pb2.EnvMeta, meta: EnvMeta, w: Writer) -> None:
    """Writes an EnvMeta into its empty message.

    Args:
        pb: The message to fill.
        meta: What to send. A dict of spaces is sent as that of a multi-agent env, a
            `gymnasium.spaces.Dict` as one space.
        w: The writer of the whole message.

    Raises:
        CodecError: A space cannot be sent; the path says which.
    """
    if meta.env_id is not None:
        set_text(pb, "env_id", meta.env_id)
    if meta.num_envs is not None:
        set_int(pb, "num_envs", meta.num_envs)
    for name in ("action_space", "observation_space"):
        space = getattr(meta, name)
        try:
            if isinstance(space, dict):
                fill_dict(getattr(pb, f"agent_{name}s"), space, w, w.limits.max_depth - 1)
            elif space is not None:
                fill_space(getattr(pb, name), space, w)
        except CodecError as error:
            under(error, name)
            raise
    try:
        pb.lossy.extend(meta.lossy)
    except UnicodeEncodeError as error:
        raise not_unicode(error, path="lossy") from error


def read_env_meta(pb: space_pb2.EnvMeta, r: Reader[Any]) -> EnvMeta:
    """Reads an EnvMeta.

    Args:
        pb: The message, a part of `r.message`.
        r: The reader of the whole message.

    Returns:
        The EnvMeta; what is absent is None.

    Raises:
        CodecError: A space is not valid or passes a limit; the path says where.
    """
    r.take_kept(4 * len(pb.env_id))
    r.take_kept(sum(_TEXT_BYTES + 4 * len(key) for key in pb.lossy))
    meta = EnvMeta(env_id=pb.env_id or None, lossy=tuple(pb.lossy))
    if pb.HasField("num_envs"):
        if not 1 <= pb.num_envs <= r.limits.max_rows:
            expected = f"expected 1 to {r.limits.max_rows}, got {pb.num_envs}"
            raise under(CodecError(expected), "num_envs")
        meta.num_envs = pb.num_envs
    for name in ("action_space", "observation_space"):
        try:
            by_agent = pb.HasField(f"agent_{name}s")
            if pb.HasField(name):
                if by_agent:
                    raise CodecError("both one space and spaces by agent")
                setattr(meta, name, read_space(getattr(pb, name), r))
            elif by_agent:
                spaces = read_dict(getattr(pb, f"agent_{name}s"), r, r.limits.max_depth - 1)
                setattr(meta, name, spaces)
        except CodecError as error:
            under(error, name)
            raise
    return meta
