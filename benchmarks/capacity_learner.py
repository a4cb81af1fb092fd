"""How much memory learners take that `rlightning train` starts, with networks and batches of several sizes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.capacity_networks import FLOAT, LearnerMemory, Network, TrainingSize, layers

_ROOT = Path(__file__).parents[1]
_ENV_STEPS = 3_000
_ROWS = 32
_LONGEST_S = 240.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Training:
    """A learner: DQN on a replay buffer.

    Attributes:
        hidden: Width of each of the two hidden layers.
        nbytes: Size of an observation, a vector of bytes.
        batch: Rows in a batch.
    """

    hidden: int
    nbytes: int
    batch: int

    @property
    def network(self) -> Network:
        """Its network; there is a second one, the target."""
        return layers((self.nbytes,), hidden=(self.hidden, self.hidden), outputs=2)

    @property
    def size(self) -> TrainingSize:
        """What its memory goes by."""
        return TrainingSize(
            weights=FLOAT * self.network.parameters,
            batch=2 * self.batch * self.nbytes,
            outputs=FLOAT * self.batch * self.network.outputs,
        )

    def config(self, folder: str) -> dict[str, object]:
        """Returns the config of the run."""
        env = {
            "name": "sim",
            "task": "simulated",
            "backend": "benchmarks.capacity_env:Simulated",
            "num_envs": _ROWS,
            "env_kwargs": {"nbytes": self.nbytes, "seconds": 0.0},
        }
        model = {"hidden": [self.hidden, self.hidden], "activation": "relu"}
        policy = {"type": "q_network", "model_cfg": model, "initial_weights": "random"}
        learner = {"algorithm": "dqn", "learning_starts": 1_000, "updates_per_step": 0.01}
        return {
            "env": env,
            "policy": {**policy, "device": "cpu"},
            "buffer": {"type": "ReplayBuffer", "capacity": 20_000, "auto_truncate_episode": True},
            "train": {"max_env_steps": _ENV_STEPS, "batch_size": self.batch, "lr": 1e-4},
            "learner": {**learner, "publish_interval": 5},
            "services": {"python_path": [str(_ROOT)]},
            "log": {"log_dir": folder},
        }


# The first is small; of the others each is large in one of what memory goes by.
FIT = (
    *(Training(64, 16, 64), Training(2048, 16, 64)),
    *(Training(64, 3_072, 4_096), Training(512, 16, 8_192)),
)
CHECK = (Training(1024, 3_072, 1_024), Training(512, 768, 8_192))


def measure(trainings: Sequence[Training]) -> list[float]:
    """Returns the most MiB that the learner of each run was resident with."""
    return [_peak_mib(training) for training in trainings]


def fit(found: Sequence[float]) -> LearnerMemory:
    """Returns the model that runs of `FIT` took these MiB by."""
    return LearnerMemory.fit([one.size for one in FIT], found)


def _peak_mib(training: Training) -> float:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump(training.config(folder)))
        command = [sys.executable, "-m", "rlightning", "train", str(config), "--quiet"]
        process = subprocess.Popen(command, cwd=_ROOT)
        peak, deadline = 0.0, time.monotonic() + _LONGEST_S
        try:
            while process.poll() is None:
                peak = max(peak, _high_water_mib(process.pid))
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{training} did not end within {_LONGEST_S:g} s")
                time.sleep(_POLL_S)
        finally:
            process.terminate()
            process.wait()
    if process.returncode:
        raise RuntimeError(f"{training} ended with {process.returncode}")
    return peak


def _high_water_mib(pid: int) -> float:
    """Returns the most that a process was resident with; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
