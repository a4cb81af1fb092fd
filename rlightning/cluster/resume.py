"""Goes on from where the learner of another run stopped."""

from __future__ import annotations

from pathlib import Path

from rlightning.cluster.past_runs import LATEST, config_of, read_checkpoint
from rlightning.errors import ConfigError
from rlightning.learner.checkpoints import Checkpoint
from rlightning.learner.loop import Algorithm
from rlightning.utils.config import MainConfig

# What a checkpoint was made for; with another value it would mean something else.
_SAME = ("learner.algorithm", "policy.type", "policy.model_cfg", "learner.gamma")


def checkpoint_to_resume(run: Path, config: MainConfig) -> Checkpoint:
    """Reads the latest checkpoint of a run, before anything is started for it.

    Args:
        run: Folder of the run.
        config: Config that it shall go on with.

    Raises:
        ConfigError: There is none, it holds weights only, or the two configs contradict each other.
    """
    before = config_of(run)
    for key in _SAME:
        section, name = key.split(".")
        old, new = getattr(getattr(before, section), name), getattr(getattr(config, section), name)
        if old != new:
            raise ConfigError(f"--resume {run}: {key} was {old!r} there, and is {new!r} here")
    checkpoint = read_checkpoint(run, LATEST, before)
    if checkpoint.state is None:
        raise ConfigError(f"{checkpoint.path} holds weights only: no learner can go on from it")
    return checkpoint


def load_checkpoint(checkpoint: Checkpoint, algorithm: Algorithm) -> None:
    """Lets an algorithm go on from a checkpoint.

    Raises:
        ConfigError: It does not fit.
    """
    from rlightning.learner.state_file import load_state  # not before now: it loads torch

    assert checkpoint.state is not None  # `checkpoint_to_resume` has looked
    try:
        algorithm.restore(load_state(checkpoint.state))
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{checkpoint.path} does not fit this config's algorithm and networks: "
            f"{type(error).__name__}: {error}"
        ) from error
