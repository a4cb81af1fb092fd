"""Folders of runs: `<log_dir>/<name>/<n>/`, never shared by two runs."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rlightning._version import __version__
from rlightning.env.episodes import EpisodeRecord
from rlightning.errors import ConfigError
from rlightning.latency.trace import StepTrace, TraceFile
from rlightning.utils.config import MainConfig

STARTING = "starting"
"""Outcome of a run before its parts are up."""

RUNNING = "running"
"""Outcome of a run that goes on."""

PROGRESS_FILE = "progress.json"
"""What the learner of a run tells of itself while it learns, in the run's folder."""

EPISODE_COLUMNS = ("return", "length", "env", "row", "seed", "version", "reason", "ts")
_RECORDED_VERSIONS = ("grpcio", "protobuf", "numpy", "gymnasium", "torch", "torchrl", "tensordict")


@dataclass
class Run:
    """The folder of one run and what is written there.

    Attributes:
        path: The folder, `<log_dir>/<name>/<n>`.
        manifest: What `manifest.json` holds.
        began: Whether its parts were up, so that `latest` points to it.
    """

    path: Path
    manifest: dict[str, Any] = field(default_factory=dict)
    began: bool = False
    _traces: TraceFile | None = None
    _progress: dict[str, Any] | None = None

    @classmethod
    def create(cls, config: MainConfig, *, command: Sequence[str]) -> Run:
        """Makes the next free folder, with its config and a manifest, or if interrupted, none.

        Safe to call from many processes at once: a number is taken by creating its folder.

        Raises:
            ConfigError: There can be no folder where `log.log_dir` wants it.
        """
        parent = Path(config.log.log_dir) / run_name(config)
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"log.log_dir '{config.log.log_dir}': cannot make {parent}: {error.strerror}"
            ) from error
        numbers = [int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()]
        for number in itertools.count(max(numbers, default=0) + 1):
            path = parent / str(number)
            try:
                path.mkdir()
            except FileExistsError:
                continue
            break
        run = cls(path)
        try:
            run._fill(config, command)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return run

    def _fill(self, config: MainConfig, command: Sequence[str]) -> None:
        for folder in (self.logs, self.checkpoints, self.tensorboard):
            folder.mkdir()
        with self.episodes.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(EPISODE_COLUMNS)
        self.save_config(config)
        self.manifest = {
            "command": list(command),
            "outcome": STARTING,
            "seed": config.train.seed,
            "start": _now(),
            "end": None,
            "git_sha": _git_sha(),
            "versions": _versions(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "pid": os.getpid(),
        }
        self._save_manifest()

    @property
    def config_file(self) -> Path:
        """The effective config; it starts each service of the run again by hand."""
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        """Folder with one log file per service."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Folder of the learner's checkpoints."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def episodes(self) -> Path:
        """Every finished episode, one line each."""
        return self.path / "episodes.csv"

    @property
    def traces(self) -> Path:
        """Traces of single steps, for Perfetto; there once a step was traced."""
        return self.path / "trace.json"

    def save_config(self, config: MainConfig) -> None:
        """Writes the effective config, atomically: a service may be reading it.

        Only this user may read it, since it may hold tokens.
        """
        write_atomically(self.config_file, config.to_yaml(), mode=0o600)

    def append_episodes(self, records: Iterable[EpisodeRecord]) -> None:
        """Adds finished episodes to `episodes.csv`."""
        with self.episodes.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            for record in records:
                ended = datetime.fromtimestamp(record.ts_end_ns / 1e9, timezone.utc)
                writer.writerow(
                    (
                        record.episode_return,
                        record.length,
                        record.env_id,
                        record.row,
                        "" if record.seed is None else record.seed,
                        record.policy_version,
                        record.reason,
                        ended.isoformat(timespec="milliseconds"),
                    )
                )

    def append_traces(self, traces: Sequence[StepTrace]) -> None:
        """Adds traced steps to `trace.json`, which begins with the first of them."""
        if not traces:
            return
        if self._traces is None:
            self._traces = TraceFile(self.traces)
        self._traces.add(traces)

    def save_progress(self, told: dict[str, Any]) -> None:
        """Writes what the learner tells of itself to `progress.json`, with the time as `time`.

        A disk that takes nothing does not end a run for the sake of what is only looked at.
        """
        self._progress = told
        text = json.dumps({"time": _now(), **told})
        with contextlib.suppress(OSError):
            write_atomically(self.path / PROGRESS_FILE, text + "\n")

    @property
    def has_logs(self) -> bool:
        """Whether a service has written anything."""
        return any(log.stat().st_size for log in self.logs.glob("*.log"))

    def begin(self) -> None:
        """Lets `latest` point to this run, now that its parts are up."""
        self.began = True
        self.manifest["outcome"] = RUNNING
        self._save_manifest()
        _point_latest(self.path.parent, self.path.name)

    def finish(self, outcome: str, summary: dict[str, Any] | None = None) -> None:
        """Records how the run ended; one that never began leaves its folder only with logs."""
        if not (self.began or self.has_logs):
            shutil.rmtree(self.path)
            return
        self.manifest.update(
            outcome=outcome, end=_now(), **({"summary": summary} if summary else {})
        )
        self._save_manifest()
        if self._progress is not None:
            self.save_progress({**self._progress, **(summary or {}), "outcome": outcome})

    def _save_manifest(self) -> None:
        write_atomically(self.path / "manifest.json", json.dumps(self.manifest, indent=2) + "\n")


def run_name(config: MainConfig) -> str:
    """Returns the name under which the runs of a config are kept."""
    if config.log.name is not None:
        return config.log.name
    return config.env[0].name.replace("/", "_") if config.env else "run"


def write_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replaces a file: a reader sees the old or the new text, never a part."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _point_latest(parent: Path, target: str) -> None:
    """Lets `latest` point to a run; a symlink can only be replaced by renaming another over it."""
    temporary = parent / f".latest-{os.getpid()}-{target}"
    temporary.symlink_to(target, target_is_directory=True)
    temporary.replace(parent / "latest")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _versions() -> dict[str, str]:
    versions = {"rlightning": __version__, "python": platform.python_version()}
    for name in _RECORDED_VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git_sha() -> str | None:
    """Returns the commit of the current folder, `-dirty` if it was changed; None outside git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def this_command() -> list[str]:
    """Returns the command line of this process, as it can be typed again."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
