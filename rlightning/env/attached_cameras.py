"""The cameras of an attached env: how the server gets the pixels of what the client sends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rlightning.env.utils.parts import Path, name_of, parts_of, with_parts
from rlightning.env.utils.pictures import (
    PictureFormat,
    check_format,
    decode_picture,
    is_picture,
    load_pillow,
)
from rlightning.errors import (
    CodecError,
    ConfigError,
    InvalidRequestError,
    PreconditionError,
    ResourceExhaustedError,
)
from rlightning.types import EnvRet
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire.frame import DEFAULT_LIMITS

_FORMATS: dict[int, PictureFormat] = {
    pb.PICTURE_FORMAT_PNG: "png",
    pb.PICTURE_FORMAT_JPEG: "jpeg",
}

# As `rpc.max_message_bytes` lets through twice.
_MAX_BYTES = DEFAULT_LIMITS.max_bytes // 2


class CameraDecoder:
    """Decodes the pictures of one client, as its hello said that they come.

    Args:
        cameras: Of the hello; at least one.
        space: Space of one row's observation.
        rows: Of the group.
        max_bytes: What the pixels of one observation may take: half of the largest message, which
            has two where an episode ends.

    Attributes:
        lossy: Names of the cameras whose pictures lose something on the way.
        nbytes: What the pixels of one observation of all rows take.

    Raises:
        InvalidRequestError: A camera is no picture of the space, or comes twice.
        PreconditionError: This server has no Pillow.
        ResourceExhaustedError: The pixels take more than `max_bytes`.
    """

    def __init__(
        self,
        cameras: Iterable[pb.CameraEncoding],
        space: Any,
        rows: int,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        try:
            load_pillow()
        except ConfigError as error:
            raise PreconditionError(
                f"this server cannot decode cameras: {error}", reason="CAMERAS"
            ) from None
        self.lossy: list[str] = []
        self._rows = rows
        self._cameras: dict[Path, tuple[PictureFormat, tuple[int, ...]]] = {}
        pictures = {path: part for path, part in parts_of(space) if is_picture(part)}
        for camera in cameras:
            path: Path = tuple(camera.path)
            name, picture_format = name_of(path), _FORMATS.get(camera.format)
            if picture_format is None:
                raise InvalidRequestError(f"camera {name!r}: there is no format {camera.format}")
            if path not in pictures or path in self._cameras:
                raise InvalidRequestError(
                    f"camera {name!r}: expected a picture of the observation space (uint8 [height, "
                    f"width] or with 1, 3, 4 channels), each once; there are "
                    f"{[name_of(known) for known in pictures]}"
                )
            shape = pictures[path].shape or ()
            try:
                check_format(picture_format, shape)
            except ConfigError as error:
                raise InvalidRequestError(f"camera {name!r}: {error}") from None
            self._cameras[path] = picture_format, shape
            if picture_format == "jpeg":
                self.lossy.append(name)
        self.nbytes = rows * sum(math.prod(shape) for _, shape in self._cameras.values())
        # A picture of a few bytes may be as large as the spec says: the spec is no limit to itself.
        if self.nbytes > max_bytes:
            raise ResourceExhaustedError(
                f"cameras: the pixels of {rows} rows take {self.nbytes} bytes; "
                f"half of services.env.rpc.max_message_bytes of the server allows {max_bytes}",
                reason="PICTURES_TOO_LARGE",
            )

    async def decode(self, env_ret: EnvRet) -> None:
        """Puts pixels in place of the pictures of an EnvRet, in a thread: it takes milliseconds.

        Raises:
            InvalidRequestError: A picture is missing, broken, or not what was declared; the message
                names its key.
        """
        await asyncio.get_running_loop().run_in_executor(None, self._decode, env_ret)

    def _decode(self, env_ret: EnvRet) -> None:
        rows = self._rows if env_ret.rows is None else min(len(env_ret.rows), self._rows)
        env_ret.observation = self._pixels(env_ret.observation, rows, "observation")
        info = env_ret.info
        if "final_observation" in info:
            rows = min(len(info["final_rows"]), rows)
            final = self._pixels(info["final_observation"], rows, "final_observation")
            info["final_observation"] = final

    def _pixels(self, value: Any, rows: int, where: str) -> Any:
        changes: dict[Path, Callable[[Any], Any]] = {
            path: partial(_pixels_of, ".".join((where, *path)), rows, *kind)
            for path, kind in self._cameras.items()
        }
        return with_parts(value, changes)


def _pixels_of(
    name: str, rows: int, picture_format: PictureFormat, shape: tuple[int, ...], pictures: Any
) -> npt.NDArray[np.uint8]:
    if (
        not isinstance(pictures, list)
        or len(pictures) != rows
        or not all(isinstance(picture, bytes) for picture in pictures)
    ):
        raise InvalidRequestError(
            f"{name}: expected a list of {rows} encoded pictures, as the hello said"
        )
    pixels = np.empty((rows, *shape), np.uint8)
    try:
        for row, picture in enumerate(pictures):
            pixels[row] = decode_picture(picture, picture_format, shape)
    except CodecError as error:
        raise InvalidRequestError(f"{name}: {error}") from None
    return pixels
