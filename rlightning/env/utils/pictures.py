"""Pictures as PNG or JPEG: uint8 arrays to bytes and back. The only place that knows Pillow."""

from __future__ import annotations

import io
import re
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlightning.errors import CodecError, ConfigError

PictureFormat = Literal["png", "jpeg"]

# What Pillow calls pictures of so many channels; None: an array without an axis of channels.
_MODES = {None: "L", 1: "L", 3: "RGB", 4: "RGBA"}
_CHANNELS: dict[PictureFormat, tuple[int | None, ...]] = {
    "png": (None, 1, 3, 4),
    "jpeg": (None, 1, 3),
}
# Parts of a PNG that are compressed on their own, or hold further pictures: a few bytes of them may
# become many, or take long, and none is a part of the picture.
_REFUSED_CHUNKS = frozenset((b"zTXt", b"iTXt", b"iCCP", b"acTL", b"fcTL", b"fdAT"))
_PNG_HEAD = 8
# The next marker of a JPEG, as its decoder finds it: in what is compressed, zero follows each 0xFF.
_MARKER = re.compile(rb"\xff([^\x00\xff])", re.DOTALL)
# Markers without a length: TEM, RST0 to RST7, SOI.
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))
_END, _SCAN = 0xD9, 0xDA


def is_picture(space: object) -> bool:
    """Whether values of a space are pictures: uint8 [height, width], or with 1, 3, 4 channels."""
    return (
        isinstance(space, gym.spaces.Box)
        and space.dtype == np.uint8
        and len(space.shape) in (2, 3)
        and min(space.shape) > 0
        and channels_of(space.shape) in _MODES
    )


def channels_of(shape: tuple[int, ...]) -> int | None:
    """Returns the channels of a picture's shape; None where it has no such axis."""
    return shape[2] if len(shape) == 3 else None


def check_format(picture_format: PictureFormat, shape: tuple[int, ...]) -> None:
    """Checks that a format has so many channels.

    Raises:
        ConfigError: It has not.
    """
    if channels_of(shape) not in _CHANNELS[picture_format]:
        raise ConfigError(f"a {picture_format} has 1 or 3 channels, not {channels_of(shape)}")


def load_pillow() -> Any:
    """Imports Pillow.

    Returns:
        `PIL.Image`.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(
            f"pictures need Pillow (pip install 'rlightning[robot]'): {error}"
        ) from error
    return Image


def resize_picture(picture: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Returns a picture in another size; bilinear, which averages when it shrinks.

    Args:
        picture: uint8 [height, width] or [height, width, channels].
        size: Height and width.
    """
    image_module = load_pillow()
    image = _image_of(picture).resize((size[1], size[0]), image_module.Resampling.BILINEAR)
    resized: npt.NDArray[np.uint8] = np.asarray(image)
    return resized.reshape((*size, *picture.shape[2:]))


def encode_picture(
    picture: npt.NDArray[np.uint8], picture_format: PictureFormat, quality: int
) -> bytes:
    """Returns a picture as a PNG or a JPEG.

    Args:
        picture: uint8 [height, width] or [height, width, channels].
        picture_format: Which.
        quality: Of a JPEG, 1 to 95; how hard to compress a PNG, 0 to 9.
    """
    out = io.BytesIO()
    how = {"compress_level": quality} if picture_format == "png" else {"quality": quality}
    _image_of(picture).save(out, picture_format, **how)
    return out.getvalue()


def decode_picture(
    data: bytes, picture_format: PictureFormat, shape: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    """Returns the pixels of a PNG or a JPEG of which nothing but the shape is known.

    What the header says is compared with the shape before any pixel is decoded, so that no more is
    allocated than such a picture takes.

    Args:
        data: The file.
        picture_format: What it has to be.
        shape: [height, width] or [height, width, channels].

    Returns:
        uint8 [*shape].

    Raises:
        CodecError: It is no such picture, or of another shape, or broken.
    """
    image_module, name = load_pillow(), picture_format.upper()
    if picture_format == "png":
        _check_chunks(data)
    try:
        with image_module.open(io.BytesIO(data), formats=(name,)) as image:
            _check_header(image, name, shape)
            if picture_format == "jpeg":
                _check_scans(data, channels_of(shape) or 1)
            image.load()
            pixels: npt.NDArray[np.uint8] = np.array(image)
    except CodecError:
        raise
    except Exception as error:  # what a parser of foreign bytes raises is anything
        raise CodecError(f"no valid {name}: {type(error).__name__}: {error}") from error
    return pixels.reshape(shape)


def _check_header(image: Any, name: str, shape: tuple[int, ...]) -> None:
    expected = (shape[1], shape[0]), _MODES[channels_of(shape)]
    if image.format != name or (image.size, image.mode) != expected:
        (width, height), mode = expected
        raise CodecError(
            f"expected a {name} of {width}x{height} {mode}, got a {image.format} of "
            f"{image.size[0]}x{image.size[1]} {image.mode}"
        )
    # Each of its scans, a few bytes, may cost as much as a whole picture.
    if image.info.get("progressive") or image.info.get("progression"):
        raise CodecError("expected a baseline JPEG, got a progressive one")


def _check_chunks(data: bytes) -> None:
    view, position = memoryview(data), _PNG_HEAD
    while position + 8 <= len(view):
        length = int.from_bytes(view[position : position + 4], "big")
        kind = bytes(view[position + 4 : position + 8])
        if kind in _REFUSED_CHUNKS:
            raise CodecError(f"a PNG with a part {kind.decode()}, which is not taken")
        position += 12 + length


def _check_scans(data: bytes, most: int) -> None:
    """Refuses a JPEG with more scans than it has components: each may cost as much as a picture."""
    position, scans = 0, 0
    while (found := _MARKER.search(data, position)) is not None:
        kind, position = found[1][0], found.end()
        if kind == _END:
            return
        if kind in _BARE:
            continue
        scans += kind == _SCAN
        if scans > most:
            raise CodecError(f"expected a JPEG of at most {most} scans, got one of more")
        position += max(2, int.from_bytes(data[position : position + 2], "big"))


def _image_of(picture: npt.NDArray[np.uint8]) -> Any:
    flat = picture[:, :, 0] if channels_of(picture.shape) == 1 else picture
    return load_pillow().fromarray(np.ascontiguousarray(flat))
