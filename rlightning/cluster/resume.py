"""Goes on from where the learner of another run stopped."""

from __future__ import annotations

from pathlib import Path

from rlightning.cluster.past_runs import LATEST, config_of, read_checkpoint
from rlightning.errors import ConfigError
from rlightning.learner.checkpoints import Checkpoint
from rlightning.learner.loop import Algorithm
from rlightning.utils.config import Config, MainConfig

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
        if isinstance(old, Config):
            old, new = old.to_dict(), new.to_dict()
            inner = next((k for k in {**old, **new} if old.get(k) != new.get(k)), None)
            if inner is not None:
                key, old, new = f"{key}.{inner}", old.get(inner), new.get(inner)
        if old != new:
            raise ConfigError(f"--resume {run}: {key} was {old!r} there, and is {new!r} here")
    checkpoint = read_checkpoint(run, LATEST, before)
    if checkpoint.state is None:
        raise ConfigError(f"{checkpoint.path} holds weights only: no learner can go on from it")
    return checkpoint


def restore_buffer(checkpoint: Checkpoint, config: MainConfig) -> str:
    """Lets the buffer of a run begin with what belongs to the checkpoint that it goes on from.

    Sets `buffer.restore`, whatever it was. Only a server that this run starts can be told so.

    Returns:
        A line that says what the buffer begins with, and what is lost; empty without a
        ReplayBuffer, in which nothing outlives an update.
    """
    buffer, wanted = config.buffer, checkpoint.buffer_checkpoint
    if config.sampled.type != "ReplayBuffer":
        return ""
    if config.services.buffer.address is not None or buffer.storage.addresses:
        return "the buffer server is not started by this run: it goes on with what it holds now"
    if buffer.data_dir is None:
        lost = "" if wanted is None else f", and {wanted} is lost"
        return f"the replay buffer begins empty: buffer.data_dir is not set{lost}"
    if wanted is not None and _has(Path(buffer.data_dir).expanduser(), wanted, config):
        buffer.restore = wanted
        return f"the replay buffer begins with {wanted} of {buffer.data_dir}"
    said = "the run kept no checkpoint of it" if wanted is None else f"{wanted} is not there"
    if buffer.durability == "none":
        buffer.restore = "none"
        return f"the replay buffer begins empty: {said} in {buffer.data_dir}"
    buffer.restore = "latest"
    return f"the replay buffer begins with the newest that {buffer.data_dir} has: {said}"


def _has(folder: Path, checkpoint: str, config: MainConfig) -> bool:
    """Whether the folder of a buffer has a checkpoint, of each of its shards if it has several."""
    names = checkpoint.split(",")
    if config.buffer.storage.type != "sharded":
        return (folder / "checkpoints" / checkpoint).is_dir()
    shards = [folder / f"buffer-{number}" for number in range(config.buffer.storage.shards)]
    return len(names) == len(shards) and all(
        (shard / "checkpoints" / name).is_dir() for shard, name in zip(shards, names, strict=True)
    )


def load_checkpoint(checkpoint: Checkpoint, algorithm: Algorithm) -> None:
    """Lets an algorithm go on from a checkpoint.

    Raises:
        ConfigError: It does not fit.
    """
    from rlightning.learner.state_file import check_alike, load_state  # not now: it loads torch

    assert checkpoint.state is not None  # `checkpoint_to_resume` has looked
    try:
        state = load_state(checkpoint.state)
        check_alike(state, algorithm.state())
        algorithm.restore(state)
    except Exception as error:  # `restore` may be a user's, and what it reads is from a file
        raise ConfigError(
            f"{checkpoint.path} does not fit this config's algorithm and networks: "
            f"{type(error).__name__}: {error}"
        ) from error
