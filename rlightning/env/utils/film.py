"""Films as mp4 files."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from rlightning.errors import ConfigError

_PIXELS = {1: "gray", 3: "rgb24", 4: "rgba"}


class FilmWriter:
    """Writes frames into an mp4 file, by an ffmpeg of its own; a context manager.

    Args:
        path: The file; one that is there is replaced.
        fps: Frames in a second.

    Raises:
        ConfigError: The extra `video` is not installed.
    """

    def __init__(self, path: str | Path, fps: float) -> None:
        self._path = path
        self._fps = fps
        self._program = load_ffmpeg().get_ffmpeg_exe()
        self._process: subprocess.Popen[bytes] | None = None
        self._shape: tuple[int, ...] = ()

    def append(self, frame: npt.NDArray[np.uint8]) -> None:
        """Adds a frame, without its last row or column where H.264, which wants even sizes, would.

        Args:
            frame: uint8 [height, width] or [height, width, channels], 1, 3 or 4 of them; all alike.

        Raises:
            ValueError: It is not like that, or not like the frames before.
            OSError: The file cannot be written.
        """
        if self._process is None:
            channels = frame.shape[2] if frame.ndim == 3 else 1
            if frame.dtype != np.uint8 or frame.ndim not in (2, 3) or channels not in _PIXELS:
                raise ValueError(f"no frame: {frame.dtype} {list(frame.shape)}")
            self._shape = frame.shape
            self._process = self._start(_even(frame), _PIXELS[channels])
        if frame.dtype != np.uint8 or frame.shape != self._shape:
            raise ValueError(
                f"frame {frame.dtype} {list(frame.shape)} after uint8 {list(self._shape)}"
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(np.ascontiguousarray(_even(frame)).data)
        except BrokenPipeError:
            self.close()
            raise

    def close(self) -> None:
        """Completes the file. Safe to repeat.

        Raises:
            OSError: It could not be written.
        """
        process, self._process = self._process, None
        if process is None:
            return
        _, said = process.communicate()
        if process.returncode:
            raise OSError(f"{self._path}: {said.decode(errors='replace').strip()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, frame: npt.NDArray[np.uint8], pixels: str) -> subprocess.Popen[bytes]:
        size = f"{frame.shape[1]}x{frame.shape[0]}"
        coming = ("-f", "rawvideo", "-pix_fmt", pixels, "-s", size, "-r", str(self._fps), "-i", "-")
        command = [self._program, "-v", "error", "-y", *coming, "-pix_fmt", "yuv420p"]
        # In a session of its own it does not hear Ctrl-C. A `preexec_fn` would do that too, but
        # would run this process's fork handlers: those of gRPC can end the child before it begins.
        return subprocess.Popen(
            [*command, f"file:{self._path}"],  # whatever its name begins with
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )


def load_ffmpeg() -> Any:
    """Returns the library that brings ffmpeg.

    Raises:
        ConfigError: The extra `video` is not installed.
    """
    try:
        return importlib.import_module("imageio_ffmpeg")
    except ImportError as error:
        raise ConfigError(
            f"films need ffmpeg (pip install 'rlightning[video]'): {error}"
        ) from error


def _even(frame: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return frame[: len(frame) // 2 * 2, : frame.shape[1] // 2 * 2]
