"""Types to and from the messages of `rlightning.v1`; never pickled, never beyond the limits.

`encode_x(object) -> bytes` and `decode_x(bytes) -> object` are whole messages. Within a gRPC
message, `fill_x` writes into a part of it with the message's `Writer`, and `read_x` reads a part of
it with its `Reader`. Whatever is wrong with a value or with bytes is a `CodecError` whose path
names the leaf.
"""

from __future__ import annotations

from rlightning.errors import CodecError
from rlightning.wire.batch import (
    Batch,
    batch_pieces,
    decode_batch,
    encode_batch,
    fill_batch,
    read_batch,
)
from rlightning.wire.env_meta import (
    decode_env_meta,
    encode_env_meta,
    fill_env_meta,
    read_env_meta,
)
from rlightning.wire.env_ret import (
    decode_env_ret,
    encode_env_ret,
    fill_env_ret,
    fill_observation,
    read_env_ret,
)
from rlightning.wire.frame import (
    CHUNK_BYTES,
    ChunkJoiner,
    Limits,
    Reader,
    Writer,
    split_batch,
    split_pieces,
)
from rlightning.wire.policy_response import (
    decode_policy_response,
    encode_policy_response,
    fill_policy_response,
    read_policy_response,
)
from rlightning.wire.space import decode_space, encode_space, fill_space, read_space
from rlightning.wire.tensor import fill_tensor, read_tensor
from rlightning.wire.value import decode_value, encode_value, fill_value, read_value

__all__ = [
    "CHUNK_BYTES",
    "Batch",
    "ChunkJoiner",
    "CodecError",
    "Limits",
    "Reader",
    "Writer",
    "batch_pieces",
    "decode_batch",
    "decode_env_meta",
    "decode_env_ret",
    "decode_policy_response",
    "decode_space",
    "decode_value",
    "encode_batch",
    "encode_env_meta",
    "encode_env_ret",
    "encode_policy_response",
    "encode_space",
    "encode_value",
    "fill_batch",
    "fill_env_meta",
    "fill_env_ret",
    "fill_observation",
    "fill_policy_response",
    "fill_space",
    "fill_tensor",
    "fill_value",
    "read_batch",
    "read_env_meta",
    "read_env_ret",
    "read_policy_response",
    "read_space",
    "read_tensor",
    "read_value",
    "split_batch",
    "split_pieces",
]
