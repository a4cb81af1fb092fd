"""The cameras of an attached env: how the client shrinks and compresses what they see."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from rlightning.env.utils.parts import Path, name_of, parts_of, with_parts, with_space
from rlightning.env.utils.pictures import (
    PictureFormat,
    check_format,
    encode_picture,
    is_picture,
    load_pillow,
    resize_picture,
)
from rlightning.errors import ConfigError
from rlightning.types import EnvMeta, EnvRet
from rlightning.v1 import env_service_pb2 as pb

_SYNTAX = re.compile(r"(?P<codec>[a-z]+)(?::(?P<quality>\d{1,3}))?(?:@(?P<w>\d+)x(?P<h>\d+))?")
_MAX_SIDE = 16384
# Of a JPEG: what most programs write. Of a PNG: larger by some percent, and several times as fast.
_DEFAULTS = {"jpeg": 80, "png": 1, "none": 0}
_QUALITIES = {"jpeg": (1, 95), "png": (0, 9), "none": (0, 0)}
_FORMATS: dict[PictureFormat, pb.PictureFormat] = {
    "png": pb.PICTURE_FORMAT_PNG,
    "jpeg": pb.PICTURE_FORMAT_JPEG,
}


@dataclass(frozen=True)
class CameraOption:
    """How the pictures of one camera are sent.

    Attributes:
        codec: `png`, `jpeg`, or None: as they are.
        quality: Of a JPEG, 1 to 95; how hard to compress a PNG, 0 to 9.
        size: Height and width to which they are resized before; None: they keep theirs.
    """

    codec: PictureFormat | None
    quality: int
    size: tuple[int, int] | None

    @staticmethod
    def parse(text: str, name: str) -> CameraOption:
        """Reads `CODEC[:QUALITY][@WIDTHxHEIGHT]`, such as `jpeg:80@320x240`, `png`, `none@320x240`.

        Args:
            text: The option.
            name: Of the camera, for the error.

        Raises:
            ConfigError: It is something else.
        """
        found = _SYNTAX.fullmatch(text)
        if found is None or found["codec"] not in _DEFAULTS:
            raise ConfigError(
                f"camera {name!r}: expected CODEC[:QUALITY][@WIDTHxHEIGHT] with a codec of none, "
                f"png, jpeg, such as jpeg:80@320x240; got {text!r}"
            )
        codec = found["codec"]
        quality, (low, high) = int(found["quality"] or _DEFAULTS[codec]), _QUALITIES[codec]
        if not low <= quality <= high:
            raise ConfigError(
                f"camera {name!r}: a {codec} has a quality of {low} to {high}, not {quality}"
            )
        size = None if found["w"] is None else (int(found["h"]), int(found["w"]))
        if size is not None and not all(1 <= side <= _MAX_SIDE for side in size):
            raise ConfigError(f"camera {name!r}: expected sides of 1 to {_MAX_SIDE}, got {text!r}")
        return CameraOption(None if codec == "none" else codec, quality, size)  # type: ignore[arg-type]


class CameraEncoder:
    """Resizes and encodes the pictures of an env, in a thread of its own.

    Args:
        options: How the pictures of each camera are sent, by the name of the camera: its keys in
            the observation joined by dots, `observation` if it is all that there is.
        meta: Of the env.

    Attributes:
        meta: What the server is told of the env: pictures have the size that is sent.

    Raises:
        ConfigError: The env has no such camera, its codec has not so many channels, or Pillow is
            missing.
    """

    def __init__(self, options: Mapping[str, CameraOption], meta: EnvMeta) -> None:
        load_pillow()
        space = meta.observation_space
        if not isinstance(space, gym.Space):
            raise ConfigError("cameras: expected an env with one observation space")
        found = [part for part in parts_of(space) if is_picture(part[1])]
        cameras: dict[Path, CameraOption] = {}
        spaces: dict[Path, gym.Space[Any]] = {}
        for name, option in options.items():
            of_name = [part for part in found if name_of(part[0]) == name]
            if len(of_name) != 1:
                known = ", ".join(repr(name_of(path)) for path, _ in found) or "none"
                raise ConfigError(
                    f"camera {name!r}: expected one picture (uint8 [height, width] or with 1, 3, 4 "
                    f"channels) of that name in the observation; there are: {known}"
                )
            [(path, part)] = of_name
            if option.codec is not None:
                try:
                    check_format(option.codec, part.shape or ())
                except ConfigError as error:
                    raise ConfigError(f"camera {name!r}: {error}") from None
            cameras[path] = option
            if option.size is not None:
                spaces[path] = _resized(part, option.size)
        lossy = [
            name_of(path)
            for path, option in cameras.items()
            if option.codec == "jpeg" or option.size is not None
        ]
        self.meta = replace(meta, observation_space=with_space(space, spaces), lossy=tuple(lossy))
        self._cameras = cameras
        self._changes: dict[Path, Callable[[Any], Any]] = {
            path: partial(_encoded, option) for path, option in cameras.items()
        }
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlightning-cameras")

    def declare(self, hello: pb.AttachHello) -> bool:
        """Says in a hello what is encoded; returns whether anything is."""
        for path, option in self._cameras.items():
            if option.codec is not None:
                hello.cameras.add(path=path, format=_FORMATS[option.codec])
        return bool(hello.cameras)

    async def encode(self, env_ret: EnvRet) -> EnvRet:
        """Returns an EnvRet with the pictures as they are sent; the one given is left as it is."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._encode, env_ret)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encode(self, env_ret: EnvRet) -> EnvRet:
        info = env_ret.info
        if "final_observation" in info:
            final = with_parts(info["final_observation"], self._changes)
            info = {**info, "final_observation": final}
        observation = with_parts(env_ret.observation, self._changes)
        return replace(env_ret, observation=observation, info=info)


def _resized(space: gym.Space[Any], size: tuple[int, int]) -> gym.spaces.Box[Any]:
    assert isinstance(space, gym.spaces.Box)
    low, high = int(space.low.min()), int(space.high.max())
    return gym.spaces.Box(low, high, (*size, *space.shape[2:]), np.uint8)


def _encoded(option: CameraOption, pictures: Any) -> Any:
    """Returns pictures [rows, ...] as they are sent: a list of bytes, or an array."""
    rows = list(np.asarray(pictures))
    if option.size is not None:
        rows = [resize_picture(row, option.size) for row in rows]
    if option.codec is None:
        return np.stack(rows)
    return [encode_picture(row, option.codec, option.quality) for row in rows]
