"""Checkpoints of a learner: weights with a manifest, whole or not there."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from rlightning.learner.loop import LearnerStats
from rlightning.policy.weight_store import write_atomically

FORMAT = 1
"""Of the manifest; a higher number is one that this version cannot read."""


class Checkpoints:
    """Writes `<folder>/<policy version>/` with `weights.safetensors` and `manifest.json`.

    A checkpoint appears under its name only when it is complete, also after a crash or a power cut;
    `<folder>/latest` is a link to the last one.

    Args:
        folder: Made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, stats: LearnerStats, weights: bytes) -> None:
        """Writes one checkpoint; one of the same version that another run left is replaced. Blocks.

        Args:
            stats: Where the learner stands.
            weights: A safetensors file: the weights published as `stats.policy_version`.

        Raises:
            OSError: It could not be written; earlier ones are still there.
        """
        name = str(stats.policy_version)
        target = self._folder / name
        manifest = {
            "format": FORMAT,
            "policy_version": stats.policy_version,
            "updates": stats.updates,
            "env_steps": stats.env_steps,
            "rows": stats.rows,
            "files": {"weights.safetensors": hashlib.sha256(weights).hexdigest()},
        }
        text = (json.dumps(manifest, indent=2) + "\n").encode()
        if target.exists() and (target / "manifest.json").read_bytes() == text:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=f".{name}-") as scratch:
            made = Path(scratch) / name
            write_atomically(made / "weights.safetensors", weights)
            write_atomically(made / "manifest.json", text)
            if target.exists():
                target.rename(Path(scratch) / "replaced")
            made.rename(target)
            link = Path(scratch) / "latest"
            link.symlink_to(name, target_is_directory=True)
            link.replace(self._folder / "latest")
