"""The codec against plain protobuf and against a copy of the same memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import Ratio, report, run_rounds
from rlightning.types import EnvRet
from rlightning.v1 import env_ret_pb2, tensor_pb2
from rlightning.wire import decode_env_ret, encode_env_ret

RATIOS = [
    Ratio("encode 3.6 MB / np.copy", "encode 3.6 MB", "np.copy 3.6 MB", ceiling=1.5),
    Ratio("decode 3.6 MB / np.copy", "decode 3.6 MB", "np.copy 3.6 MB", ceiling=0.2),
    Ratio("encode 3.6 MB / plain protobuf", "encode 3.6 MB", "protobuf encode 3.6 MB"),
    Ratio("decode 3.6 MB / plain protobuf", "decode 3.6 MB", "protobuf decode 3.6 MB"),
    Ratio("encode 64 CartPole rows / plain protobuf", "encode 64 rows", "protobuf encode 64 rows"),
    Ratio("decode 64 CartPole rows / plain protobuf", "decode 64 rows", "protobuf decode 64 rows"),
]


def images(n: int) -> EnvRet:
    """A group of n rows of 84x84x4 uint8."""
    rng = np.random.default_rng(0)
    return group(rng.integers(0, 255, (n, 84, 84, 4), np.uint8))


def group(observation: Any) -> EnvRet:
    """An EnvRet as the actor asks with: observation, reward and flags."""
    n = len(observation)
    return EnvRet(
        "env-0-0",
        observation,
        np.ones(n, np.float32),
        np.zeros(n, bool),
        np.zeros(n, bool),
    )


def plain_encode(env_ret: EnvRet) -> bytes:
    """The same message through plain protobuf, filled in place."""
    message = env_ret_pb2.EnvRet(env_id=env_ret.env_id)
    _plain_tensor(message.observation.tensor_value, env_ret.observation)
    _plain_tensor(message.last_reward.tensor_value, env_ret.last_reward)
    _plain_tensor(message.last_terminated.tensor_value, env_ret.last_terminated)
    _plain_tensor(message.last_truncated.tensor_value, env_ret.last_truncated)
    message.ts_env_sent_ns = env_ret.ts_env_sent_ns
    return message.SerializeToString()


_DTYPES = {
    "uint8": tensor_pb2.DTYPE_UINT8,
    "float32": tensor_pb2.DTYPE_FLOAT32,
    "bool": tensor_pb2.DTYPE_BOOL,
}


def _plain_tensor(tensor: tensor_pb2.Tensor, array: np.ndarray) -> None:
    tensor.dtype = _DTYPES[array.dtype.name]
    tensor.shape.extend(array.shape)
    tensor.data = array.tobytes()


def plain_decode(data: bytes) -> tuple[np.ndarray, ...]:
    """Reads it back through plain protobuf, as arrays."""
    message = env_ret_pb2.EnvRet.FromString(data)
    out = []
    for value, dtype in (
        (message.observation, None),
        (message.last_reward, np.float32),
        (message.last_terminated, bool),
        (message.last_truncated, bool),
    ):
        tensor = value.tensor_value
        kind = dtype or (np.uint8 if tensor.dtype == tensor_pb2.DTYPE_UINT8 else np.float32)
        out.append(np.frombuffer(tensor.data, kind).reshape(tensor.shape))
    return tuple(out)


def timed(function: Callable[[], object], seconds: float) -> float:
    """Microseconds per call."""
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(10):
            function()
        calls += 10
    return elapsed / calls * 1e6


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the codec's table."""
    big, small = (
        images(128),
        group(np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)),
    )
    big_bytes, small_bytes = encode_env_ret(big), encode_env_ret(small)
    assert big_bytes == plain_encode(big)
    assert small_bytes == plain_encode(small)
    functions: dict[str, Callable[[], object]] = {
        "np.copy 3.6 MB": lambda: np.copy(big.observation),
        "encode 3.6 MB": lambda: encode_env_ret(big),
        "decode 3.6 MB": lambda: decode_env_ret(big_bytes),
        "protobuf encode 3.6 MB": lambda: plain_encode(big),
        "protobuf decode 3.6 MB": lambda: plain_decode(big_bytes),
        "encode 64 rows": lambda: encode_env_ret(small),
        "decode 64 rows": lambda: decode_env_ret(small_bytes),
        "protobuf encode 64 rows": lambda: plain_encode(small),
        "protobuf decode 64 rows": lambda: plain_decode(small_bytes),
    }
    cells = {name: (lambda f=f: timed(f, seconds)) for name, f in functions.items()}
    table = run_rounds(cells, rounds=rounds, unit="us")
    good = report("Codec", table, RATIOS, slack=slack)
    return malloc(rounds, seconds, slack) and good


def malloc(rounds: int, seconds: float, slack: float) -> bool:
    """Encodes 0.45 MB in a fresh process with glibc's default malloc and with the launcher's thresholds."""
    from rlightning.cluster.process import MALLOC_ENV

    code = (
        "import sys; from benchmarks.codec import images, timed; from rlightning.wire import encode_env_ret; "
        f"e = images(16); timed(lambda: encode_env_ret(e), 0.05); print(timed(lambda: encode_env_ret(e), {seconds}))"
    )

    def run(env: dict[str, str]) -> float:
        out = subprocess.run(
            ["env", *(f"{k}={v}" for k, v in env.items()), sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
        )
        return float(out.stdout)

    cells = {"default malloc": lambda: run({}), "tuned malloc": lambda: run(MALLOC_ENV)}
    table = run_rounds(cells, rounds=rounds, unit="us")
    ratio = Ratio(
        "encode 0.45 MB, default / tuned malloc", "default malloc", "tuned malloc", ceiling=1.5
    )
    return report("Codec and malloc", table, [ratio], slack=slack)
