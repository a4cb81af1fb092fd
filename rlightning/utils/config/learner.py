"""Sections `train` and `learner`: how long and towards what, and by which algorithm."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from rlightning.utils.config.base import Config
from rlightning.utils.config.services import http_address

# What the learner knows by name, and the buffer that it needs; None: either.
ALGORITHMS = {
    "ppo": "RolloutBuffer",
    "vtrace": "RolloutBuffer",
    "dqn": "ReplayBuffer",
    "sac": "ReplayBuffer",
    "policy": None,
}


class TrainConfig(Config):
    """How long and towards what to train.

    Attributes:
        max_env_steps: Env steps that the envs execute, at the least, unless the target ends the run
            before; every row of every env counts. Training ends with the first update after them.
        target_return: Mean return at which the run has succeeded and ends; None: run to the last
            step.
        target_episodes: Finished episodes over which the mean return is taken.
        after_target: What `rlightning train` does once training has ended, target reached or not:
            `exit`, or `serve` on with the last weights until it is stopped.
        seed: Root of every seed of the run that the config leaves open.
        lockstep: Let envs and learner take turns, so that a run on CPUs can be repeated bit for
            bit, also from a checkpoint: each round begins with a seeded reset of all envs, in which
            every row takes `buffer.rollout_length` steps, one group after the other. It is slow.
        lr: Learning rate.
        batch_size: Transitions in one minibatch.
        max_epochs: Batches to learn from at most; -1: no limit.
        max_rollout_steps: Documented; `buffer.rollout_length` decides here.
        max_eval_rollout_steps: Documented; no effect on a training run here.
        parallel: `ddp` makes sure that torchrun has started this: several learners, each with its
            share of the data and `batch_size` rows of its own. Under torchrun they are that in any
            case.
        eval_interval: Rollout batches between evaluations; -1: none.
        save_interval: Batches between checkpoints; -1: only the last.
        save_keep: Checkpoints to go on from that are kept, the last ones; and the best weights.
        save_dir: Directory of checkpoints; None: `checkpoints/` of the run.
    """

    max_env_steps: int = Field(default=1_000_000, ge=1)
    target_return: float | None = None
    target_episodes: int = Field(default=100, ge=1)
    after_target: Literal["serve", "exit"] = "exit"
    seed: int = Field(default=0, ge=0)
    lockstep: bool = False
    lr: float = Field(default=3e-4, gt=0)
    batch_size: int = Field(default=64, ge=1)
    max_epochs: int = -1
    max_rollout_steps: int = -1
    max_eval_rollout_steps: int = -1
    parallel: Literal["ddp"] | None = None
    eval_interval: int = -1
    save_interval: int = -1
    save_keep: int = Field(default=2, ge=1)
    save_dir: str | None = None


class LearnerConfig(Config):
    """The algorithm and its hyperparameters.

    Attributes:
        algorithm: `ppo` or `vtrace` (PPO for rollouts of several versions ago) on a RolloutBuffer,
            `dqn` or `sac` on a ReplayBuffer; `policy` lets the policy's own `update_dataset` and
            `train` learn; `module:function` makes an algorithm of the user's from the policy, this
            section, section `train` and a `seed`.
        table: The table that is sampled, one of `buffer.tables` if there are any.
        gamma: Discount of the return.
        gae_lambda: Mixing of n-step advantages, of `ppo`.
        clip_epsilon: Bound of the ratio between target and behaviour policy, of `ppo` and
            `vtrace`.
        entropy_coeff: Weight of the entropy bonus, of the same.
        critic_coeff: Weight of the value loss, of the same.
        epochs: Passes over one rollout batch, of the same.
        max_grad_norm: Bound of the gradient's norm; `sac` has none.
        anneal_lr: Let the learning rate fall to 0 while `train.max_env_steps` rows are learned
            from, of `ppo` and `vtrace`.
        rho_clip: Bound of the ratio by which V-trace weighs a step.
        c_clip: Bound of the ratio by which V-trace weighs how far later steps reach back.
        updates_per_step: Updates for each env step, of who learns from a ReplayBuffer. The learner
            waits for env steps, and actors are paused while they are ahead.
        learning_starts: Env steps before the first update from a ReplayBuffer.
        max_lead: Env steps that actors may be ahead of the updates that are due.
        publish_interval: Updates from a ReplayBuffer between two publishes of weights.
        max_staleness: Age in versions beyond which replayed rows are left out of a batch; None: no
            row is too old.
        tau: What part of the way the target network goes to the trained one; 1 copies it.
        target_interval: Updates between two such moves.
        double: Whether the trained network chooses the action that the target network values, of
            `dqn`.
        epsilon_start: Probability of a random action at first, of `dqn`.
        epsilon_end: And once `epsilon_steps` env steps were executed; it falls linearly.
        epsilon_steps: How many env steps that takes.
        alpha_init: Weight of the entropy at first, of `sac`, which finds the right one.
        target_entropy: Entropy of the actions, scaled to [-1, 1], that `sac` aims at; None: minus
            the number of their components.
        torch_threads: Threads of torch in the learner.
        metrics: HOST:PORT where the learner shows its metrics; see `services.policy.metrics`.
        health: HOST:PORT where the learner serves `grpc.health.v1`, in plaintext and to anyone, and
            nothing else; a port alone stands for one on 127.0.0.1; None: nowhere.
    """

    algorithm: str = "ppo"
    table: str = "default"
    gamma: float = Field(default=0.99, ge=0, le=1)
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    clip_epsilon: float = Field(default=0.2, gt=0)
    entropy_coeff: float = Field(default=0.0, ge=0)
    critic_coeff: float = Field(default=0.5, ge=0)
    epochs: int = Field(default=4, ge=1)
    max_grad_norm: float = Field(default=0.5, gt=0)
    anneal_lr: bool = False
    rho_clip: float = Field(default=1.0, gt=0)
    c_clip: float = Field(default=1.0, gt=0)
    updates_per_step: float = Field(default=1.0, gt=0)
    learning_starts: int = Field(default=1000, ge=1)
    max_lead: int = Field(default=256, ge=1)
    publish_interval: int = Field(default=16, ge=1)
    max_staleness: int | None = Field(default=None, ge=0)
    tau: float = Field(default=0.005, gt=0, le=1)
    target_interval: int = Field(default=1, ge=1)
    double: bool = True
    epsilon_start: float = Field(default=1.0, ge=0, le=1)
    epsilon_end: float = Field(default=0.05, ge=0, le=1)
    epsilon_steps: int = Field(default=10_000, ge=1)
    alpha_init: float = Field(default=1.0, gt=0)
    target_entropy: float | None = None
    torch_threads: int = Field(default=1, ge=1)
    metrics: str | None = None
    health: str | None = None

    @field_validator("metrics", "health", mode="before")
    @classmethod
    def check_address(cls, address: Any) -> Any:
        """Makes a port an address, and refuses what is none."""
        return http_address(address)

    @field_validator("algorithm")
    @classmethod
    def check_algorithm(cls, algorithm: str) -> str:
        """Refuses a name that is neither known nor `module:function`."""
        if ":" not in algorithm and algorithm not in ALGORITHMS:
            raise ValueError(
                f"expected one of {', '.join(ALGORITHMS)}, or module:function, got '{algorithm}'"
            )
        return algorithm
