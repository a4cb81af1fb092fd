"""Keeps published weights as bytes, in memory and in a directory; knows nothing of tensors."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlightning.errors import ConfigError

_LOG = logging.getLogger(__name__)
# What is left of a write that was cut short; one that goes on is younger.
_ABANDONED_NS = 3600 * 10**9
_CHECKPOINT = "weights.safetensors"
_NAME = re.compile(r"weights-(\d+)-([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True)
class Weights:
    """One published version.

    Attributes:
        version: Above every version before it.
        data: A safetensors file.
        sha256: Digest of `data`, 32 bytes.
    """

    version: int
    data: bytes
    sha256: bytes

    @classmethod
    def of(cls, version: int, data: bytes) -> Weights:
        """Returns the weights with their digest; hashes all of `data`."""
        return cls(version, data, hashlib.sha256(data).digest())


class WeightStore:
    """The newest weights in a directory, so that they outlive the process; replicas may share one.

    The file names carry version and digest, so that a damaged file is known as such.

    Args:
        directory: Made if it is not there.

    Raises:
        ConfigError: The directory cannot be made.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"policy.state_dir '{directory}': {error.strerror}") from error
        for half_written in self._directory.glob(".weights-*"):
            with suppress(FileNotFoundError):
                if time.time_ns() - half_written.stat().st_mtime_ns > _ABANDONED_NS:
                    half_written.unlink()

    def save(self, weights: Weights) -> None:
        """Writes weights so that they survive a power cut, then removes older ones. Blocks.

        Raises:
            OSError: They could not be written; older ones are still there.
        """
        path = self._directory / f"weights-{weights.version}-{weights.sha256.hex()}.safetensors"
        write_atomically(path, weights.data)
        for version, _, path in self._files():
            if version < weights.version:
                path.unlink(missing_ok=True)

    def load(self) -> Weights | None:
        """Returns the newest weights that are whole; None if there are none. Blocks."""
        for version, digest, path in sorted(self._files(), reverse=True):
            try:
                weights = Weights.of(version, path.read_bytes())
            except FileNotFoundError:
                return self.load()  # another replica has replaced it by newer ones
            if weights.sha256 == digest:
                return weights
            _LOG.error("%s is damaged: its checksum does not match; trying an older one", path)
        return None

    def _files(self) -> list[tuple[int, bytes, Path]]:
        matches = ((_NAME.fullmatch(path.name), path) for path in self._directory.iterdir())
        return [(int(m[1]), bytes.fromhex(m[2]), path) for m, path in matches if m is not None]


def read_weights(path: str | Path) -> Weights:
    """Returns weights that somebody has kept. Blocks.

    Args:
        path: A safetensors file; or a directory: of a `WeightStore`, or with `weights.safetensors`.

    Returns:
        The weights; version 1 unless the file's name tells which.

    Raises:
        ConfigError: There are none, or what is there is damaged.
    """
    path = Path(path).expanduser()
    try:
        if path.is_dir() and not (path / _CHECKPOINT).is_file():
            kept = WeightStore(path).load()
            if kept is None:
                best = path / "checkpoints" / "best"
                hint = f"; this run has '{best}'" if (best / _CHECKPOINT).is_file() else ""
                raise ConfigError(
                    f"policy.restore '{path}': expected {_CHECKPOINT}, or weights that a policy "
                    f"server has kept, and found none that are whole{hint}"
                )
            return kept
        file = path / _CHECKPOINT if path.is_dir() else path
        name = _NAME.fullmatch(file.name)
        weights = Weights.of(1 if name is None else int(name[1]), file.read_bytes())
    except OSError as error:
        raise ConfigError(f"policy.restore '{path}': {error.strerror}") from error
    if name is not None and weights.sha256 != bytes.fromhex(name[2]):
        raise ConfigError(f"policy.restore '{path}' is damaged: its checksum does not match")
    return weights


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file that is there whole or not at all, also after a power cut. Blocks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
