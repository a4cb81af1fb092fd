"""Which camera settings a link carries: sizes and encodings of pictures against Mbit/s."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SIZES = ((84, 84), (224, 224), (320, 240), (640, 480), (1280, 720), (1920, 1080))
"""Widths and heights that are looked at."""

SHARE = 0.8
"""Part of the link that pictures may take: the rest is for answers, acks and other steps."""

_RAW_BYTES = 3.0
_TEST_SIZE = (640, 480)
_SENSOR_NOISE = 2.0
_CONTRAST = 50.0


@dataclass(frozen=True)
class CameraFit:
    """One camera at one size and encoding.

    Attributes:
        width: Of its picture, in pixels.
        height: The same.
        encoding: `none` (RGB as it is), `png`, or `jpeg:QUALITY`.
        frame_bytes: Size of a picture; of an encoded one as of a test picture.
        max_fps: Frames per second that fit into `SHARE` of the link.
        frame_s: How long one picture is on the line, in seconds.
    """

    width: int
    height: int
    encoding: str
    frame_bytes: int
    max_fps: float
    frame_s: float


def camera_fits(up_mbit_s: float) -> list[CameraFit]:
    """Returns every size and encoding with the frame rate that a link carries, smallest first.

    Encodings other than `none` are there where Pillow is.
    """
    fits = []
    for width, height in SIZES:
        for encoding, pixel_bytes in bytes_per_pixel().items():
            frame_bytes = round(width * height * pixel_bytes)
            frame_s = frame_bytes * 8 / (up_mbit_s * 1e6)
            fits.append(CameraFit(width, height, encoding, frame_bytes, SHARE / frame_s, frame_s))
    return fits


@lru_cache(maxsize=1)
def bytes_per_pixel() -> dict[str, float]:
    """Returns what a pixel takes by encoding, of a test picture of 640 x 480."""
    found = {"none": _RAW_BYTES}
    try:
        from PIL import Image
    except ModuleNotFoundError:
        return found
    picture = Image.fromarray(scene(*_TEST_SIZE))
    pixels = _TEST_SIZE[0] * _TEST_SIZE[1]
    for name, kind, options in (
        ("png", "png", {}),
        ("jpeg:90", "jpeg", {"quality": 90}),
        ("jpeg:80", "jpeg", {"quality": 80}),
    ):
        file = io.BytesIO()
        picture.save(file, kind, **options)
        found[name] = file.tell() / pixels
    return found


def scene(width: int, height: int) -> NDArray[np.uint8]:
    """Returns a picture with the statistics of a natural scene, always the same one.

    Its amplitudes fall with 1 / spatial frequency (D. J. Field, J. Opt. Soc. Am. A 4, 2379, 1987);
    the channels share most of it, and each has noise of its own as a sensor has.

    Returns:
        RGB, [height, width, 3].
    """
    generator = np.random.default_rng(0)
    vertical, horizontal = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    frequency = np.hypot(vertical, horizontal)
    frequency[0, 0] = 1.0

    def layer() -> NDArray[np.float64]:
        phases = np.exp(2j * np.pi * generator.random(frequency.shape))
        picture = np.fft.irfft2(phases / frequency, (height, width))
        scaled: NDArray[np.float64] = (picture - picture.mean()) / picture.std()
        return scaled

    light = layer()
    channels = [0.95 * light + 0.3 * layer() for _ in range(3)]
    picture = 128 + _CONTRAST * np.stack(channels, axis=-1)
    picture += generator.normal(0.0, _SENSOR_NOISE, picture.shape)
    return np.clip(picture, 0, 255).astype(np.uint8)
