"""Fills in what a config leaves to the run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from rlightning.buffer.routing import tables_of
from rlightning.cluster.guard import require_policy_server
from rlightning.env.hosting import group_name
from rlightning.env.utils.backends import backend_class
from rlightning.errors import ConfigError
from rlightning.utils.config import ALGORITHMS, DEFAULT_POLICY, MainConfig


def prepare(config: MainConfig) -> MainConfig:
    """Returns a copy in which every seed has a value, derived from `train.seed`.

    A ReplayBuffer stores an episode as soon as the env has ended it.

    Raises:
        ConfigError: There is no env and none will attach, nothing here hosts one, a learner would
            wait for envs that others step, or the policy server is not installed.
    """
    service = config.services.env
    acted = [env for env in config.env if env.driver == "actor"]
    hosts = service.elsewhere or any(env.num_workers for env in acted)
    if not config.env and not service.min_clients:
        raise ConfigError(
            "the config has no env; add a section 'env', or services.env.min_clients for envs that "
            "attach"
        )
    if not hosts and (not service.min_clients or service.attached_driver == "external"):
        raise ConfigError(
            "no env here is for the actor loop: set env[].driver or services.env.attached_driver "
            "to 'actor', or services.env.min_clients for envs that attach"
        )
    for env in config.env:
        # A class of the user's own is for the env server to import.
        if not service.elsewhere and ":" not in env.backend:
            backend_class(env.backend)
    if not config.services.policy.elsewhere:
        require_policy_server()
        _check_policies(config)
    prepared = config.model_copy(deep=True)
    seeds = np.random.SeedSequence(config.train.seed).generate_state(1 + len(config.env))
    # Simulators and torch take what fits a signed 32-bit integer.
    policy_seed, *env_seeds = (int(seed) >> 1 for seed in seeds)
    if prepared.policy.seed is None:
        prepared.policy.seed = policy_seed
    for named in prepared.policy.named.values():
        if named.seed is None:
            named.seed = prepared.policy.seed
    for env, seed in zip(prepared.env, env_seeds, strict=True):
        if env.seed is None:
            env.seed = seed
    for table in (prepared.buffer, *prepared.buffer.tables.values()):
        if table.type == "ReplayBuffer":
            table.auto_truncate_episode = True  # nobody else ends episodes in a run
    sampler = prepared.buffer.sampler
    if sampler is not None and sampler.seed is None:
        sampler.seed = int(np.random.SeedSequence([config.train.seed, 1]).generate_state(1)[0])
    return prepared


def _check_policies(config: MainConfig) -> None:
    policies = config.policy.by_name()
    for index, env in enumerate(config.env):
        if env.policy not in policies:
            raise ConfigError(
                f"env.{index}.policy: expected one of {', '.join(policies)} (policy.named), got "
                f"'{env.policy}'"
            )


def check_learner(config: MainConfig) -> None:
    """Checks that algorithm and buffer belong together.

    Raises:
        ConfigError: They do not, or rows of another policy would be learned from.
    """
    check_table(config)
    for index, env in enumerate(config.env):
        if env.policy != DEFAULT_POLICY and env.driver == "actor" and env.num_workers:
            tables = tables_of(config.buffer, f"{group_name(env.name)}-0-0")
            if config.learner.table in tables:
                raise ConfigError(
                    f"env.{index}.policy: rows in which '{env.policy}' acts would be learned from "
                    "like the learner's own; give them a table of their own in buffer.tables, and "
                    f"let the envs of table '{config.learner.table}' leave them out"
                )
    algorithm, buffer = config.learner.algorithm, config.sampled
    needed = ALGORITHMS.get(algorithm)
    if needed is not None and buffer.type != needed:
        raise ConfigError(
            f"learner.algorithm '{algorithm}' needs buffer.type {needed}, got {buffer.type}"
        )
    other_gamma = buffer.n_step_gamma != config.learner.gamma
    if needed == "ReplayBuffer" and buffer.n_step > 1 and other_gamma:
        raise ConfigError(
            f"buffer.n_step_gamma {buffer.n_step_gamma:g} and learner.gamma "
            f"{config.learner.gamma:g} differ"
        )
    if buffer.type == "ReplayBuffer" and config.learner.learning_starts > buffer.capacity:
        raise ConfigError(
            f"learner.learning_starts: expected at most buffer.capacity {buffer.capacity}, got "
            f"{config.learner.learning_starts}"
        )


def check_lockstep(config: MainConfig) -> None:
    """Checks that a run in lockstep can be.

    Raises:
        ConfigError: Something in it would come when it comes; the message names the key.
    """
    if not config.train.lockstep:
        return
    services, storage = config.services, config.buffer.storage
    for name in ("env", "policy", "buffer"):
        if getattr(services, name).address is not None:
            raise ConfigError(
                f"train.lockstep: services.{name}.address is set, and a server that the run does "
                "not start may have served others"
            )
    policies, envs = services.policy, services.env
    independent = any(env.vectorization_mode == "independent" for env in config.env)
    for key, wrong, reason in (
        ("env.vectorization_mode independent", independent, "rows come when they are ready"),
        ("services.policy.addresses", bool(policies.addresses), "they may have served others"),
        ("services.policy.replicas", policies.replicas > 1, "who answers depends on the load"),
        ("services.env.addresses", bool(envs.addresses), "they may have served others"),
        ("services.env.replicas", envs.replicas > 1, "it needs one env server"),
        ("policy.named", bool(config.policy.named), "a frozen policy draws on from where it is"),
        ("services.env.min_clients", envs.min_clients > 0, "nobody can seed their envs"),
        ("buffer.storage.type", storage.type == "sharded", "it needs one buffer server"),
        ("buffer.tables", bool(config.buffer.tables), "it needs one table"),
        ("buffer.rate_limiter", config.buffer.rate_limiter is not None, "turns would wait for it"),
    ):
        if wrong:
            raise ConfigError(f"train.lockstep: not with {key}: {reason}")


def check_ranks(config: MainConfig, world_size: int, *, in_process: bool) -> None:
    """Checks that several learners can share the data of a run.

    Args:
        config: Of the run.
        world_size: How many there are; 0 if torchrun did not start them.
        in_process: Whether the services are objects of one of them.

    Raises:
        ConfigError: They cannot.
    """
    if config.train.parallel == "ddp" and not world_size:
        raise ConfigError(
            "train.parallel 'ddp': start it with torchrun --nproc-per-node N -m rlightning train"
        )
    if world_size < 2:
        return
    if in_process:
        raise ConfigError("several learners need services of their own, not --launcher in-process")
    if config.buffer.storage.type == "sharded":
        raise ConfigError("buffer.storage.type: several learners share one buffer server")


def check_table(config: MainConfig) -> None:
    """Checks that there is the table which the learner samples.

    Raises:
        ConfigError: There are others only.
    """
    tables, wanted = list(config.buffer.tables) or ["default"], config.learner.table
    if wanted not in tables:
        raise ConfigError(f"learner.table: expected one of {', '.join(tables)}, got '{wanted}'")


def check_batch_size(config: MainConfig) -> None:
    """Checks that a rollout holds a minibatch, where the config tells how large a rollout is.

    Raises:
        ConfigError: It does not.
    """
    service = config.services.env
    buffer = config.sampled
    if buffer.type != "RolloutBuffer" or service.elsewhere or service.min_clients:
        return
    acted = [env for env in config.env if env.driver == "actor"]
    length = buffer.rollout_length
    envs = service.replicas * sum(env.num_workers * env.num_envs for env in acted)
    if config.train.batch_size > length * envs:
        raise ConfigError(
            f"train.batch_size: expected at most {length * envs}, the rows of one rollout "
            f"(buffer.rollout_length {length}, {envs} envs), got {config.train.batch_size}"
        )


def make_save_dir(config: MainConfig) -> None:
    """Makes `train.save_dir` before anything is learned that could not be saved there.

    Raises:
        ConfigError: It cannot be made or written.
    """
    if config.train.save_dir is None:
        return
    folder = Path(config.train.save_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"train.save_dir '{folder}': {error.strerror}") from error


def own_state(config: MainConfig, run: Path) -> None:
    """Lets published weights outlive the policy server: in the run's folder, unless told otherwise.

    A config that was saved by another run names that run's folder, which stays that run's own.
    """
    state_dir = config.policy.state_dir
    if state_dir is None or (Path(state_dir).parent / "manifest.json").exists():
        config.policy.state_dir = str(run / "policy")
