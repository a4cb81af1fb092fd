"""Checkpoints of a learner: weights and state with a manifest, whole or not there."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlightning.errors import ConfigError
from rlightning.learner.loop import LearnerStats
from rlightning.policy.weight_store import write_atomically

FORMAT = 2
"""Of the manifest; a higher number is one that this version cannot read."""

WEIGHTS, STATE, MANIFEST = "weights.safetensors", "learner.safetensors", "manifest.json"
_COUNTS = ("policy_version", "updates", "env_steps", "rows")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read.

    Attributes:
        path: Its folder.
        policy_version: Version under which its weights were published.
        updates: Updates of the learner up to it.
        env_steps: Env steps up to it.
        rows: Rows learned from up to it.
        mean_return: Mean return of the last episodes then; None if it is not known.
        buffer_checkpoint: Name of the one that the buffer server wrote with it; None: none.
        weights: A safetensors file.
        state: What the algorithm's `restore` takes, as `load_state` reads it; None if only weights
            were kept.
    """

    path: Path
    policy_version: int
    updates: int
    env_steps: int
    rows: int
    mean_return: float | None
    buffer_checkpoint: str | None
    weights: bytes
    state: bytes | None

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Reads a checkpoint and compares it with its checksums.

        Raises:
            ConfigError: There is none, it is damaged, or a newer version of this library wrote it.
        """
        try:
            path = folder.resolve()
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            if manifest["format"] > FORMAT:
                raise ConfigError(
                    f"{folder}: a checkpoint of format {manifest['format']}, which a newer version "
                    f"wrote; this one reads up to {FORMAT}"
                )
            checksums = dict(manifest["files"])
            if not checksums.keys() <= {WEIGHTS, STATE}:
                raise ValueError(f"files: expected {WEIGHTS} and {STATE}, got {list(checksums)}")
            files = {name: (path / name).read_bytes() for name in checksums}
            counts = {name: int(manifest[name]) for name in _COUNTS}
            weights = files[WEIGHTS]
        except OSError as error:
            raise ConfigError(f"{folder}: no checkpoint: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ConfigError(f"{folder}: the manifest is damaged: {error!r}") from error
        for name, data in files.items():
            if hashlib.sha256(data).hexdigest() != checksums[name]:
                raise ConfigError(f"{path / name} is damaged: its checksum does not match")
        return cls(
            path,
            **counts,
            mean_return=manifest.get("mean_return"),
            buffer_checkpoint=manifest.get("buffer_checkpoint"),
            weights=weights,
            state=files.get(STATE),
        )

    def stats(self) -> LearnerStats:
        """Returns where a learner stands that goes on from here."""
        return LearnerStats(
            updates=self.updates,
            rows=self.rows,
            env_steps=self.env_steps,
            policy_version=self.policy_version,
        )


class Checkpoints:
    """Writes `<folder>/<policy version>/` with weights, state and `manifest.json`.

    A checkpoint appears under its name only when it is complete, also after a crash or a power cut;
    `<folder>/latest` is a link to the last one, `<folder>/best` to the one of the best mean return.

    Args:
        folder: Made if it is not there.
        keep: How many of those written here, and to go on from, are kept beside the best.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder
        self._keep = keep
        # Those written here to go on from, by folder, the oldest first: those of the buffer.
        self._kept: dict[str, str | None] = {}

    @property
    def of_buffer(self) -> list[str]:
        """Names of the buffer's checkpoints that those written here belong to."""
        return [name for name in self._kept.values() if name is not None]

    def save(
        self,
        stats: LearnerStats,
        weights: bytes,
        state: bytes | None = None,
        *,
        link: str = "latest",
        mean_return: float | None = None,
        buffer_checkpoint: str | None = None,
    ) -> None:
        """Writes one checkpoint; one of the same version that another run left is replaced. Blocks.

        Args:
            stats: Where the learner stands.
            weights: A safetensors file: the weights published as `stats.policy_version`.
            state: What the algorithm's `state` returned, as `dump_state` writes it; None: this is
                not to go on from.
            link: `latest` or `best`: which link points to it then. What `best` pointed to before is
                removed if only weights were kept of it.
            mean_return: Mean return of the last episodes.
            buffer_checkpoint: Name of the buffer's checkpoint that belongs to it.

        Raises:
            OSError: It could not be written; earlier ones are still there.
        """
        name = str(stats.policy_version)
        target = self._folder / name
        files = {WEIGHTS: weights} if state is None else {WEIGHTS: weights, STATE: state}
        manifest: dict[str, Any] = {
            "format": FORMAT,
            **{key: getattr(stats, key) for key in _COUNTS},
            "mean_return": mean_return,
            "buffer_checkpoint": buffer_checkpoint,
            "files": {file: hashlib.sha256(data).hexdigest() for file, data in files.items()},
        }
        if not _holds(target, manifest):
            self._write(target, files, manifest)
        self._point(link, name)
        if state is not None:
            self._kept.pop(name, None)
            self._kept[name] = buffer_checkpoint
            self._prune()

    def _prune(self) -> None:
        """Removes what is neither among the last ones nor the best."""
        best = self._folder / "best"
        kept = best.readlink().name if best.is_symlink() else None
        for name in [one for one in self._kept if one != kept][: -self._keep]:
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=f".{name}-") as scratch:
                (self._folder / name).rename(Path(scratch) / "superseded")
            del self._kept[name]

    def _write(self, target: Path, files: Mapping[str, bytes], manifest: Mapping[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=f".{target.name}-") as scratch:
            made = Path(scratch) / target.name
            for file, data in files.items():
                write_atomically(made / file, data)
            text = json.dumps(manifest, indent=2) + "\n"
            write_atomically(made / MANIFEST, text.encode())
            if target.exists():
                target.rename(Path(scratch) / "replaced")
            made.rename(target)

    def _point(self, link: str, name: str) -> None:
        path = self._folder / link
        before = self._folder / path.readlink() if path.is_symlink() else None
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=f".{link}-") as scratch:
            made = Path(scratch) / link
            made.symlink_to(name, target_is_directory=True)
            made.replace(path)
            if before is None or link != "best" or before.name == name:
                return
            if before.exists() and not (before / STATE).exists():
                before.rename(Path(scratch) / "superseded")


def _holds(target: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether a folder holds this checkpoint already, with at least these files."""
    try:
        there = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        return bool(manifest["files"].items() <= there["files"].items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False
