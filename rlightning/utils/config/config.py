"""The sections of a config file under their documented names."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from rlightning.errors import ConfigError
from rlightning.utils.config.base import Config
from rlightning.utils.config.buffer import BufferConfig
from rlightning.utils.config.rpc import ClientAuthConfig, ListenConfig, check_address
from rlightning.utils.config.services import ServicesConfig, http_address

# Backends whose adapter hosts many sub-envs in one env, and those that host exactly one.
VECTORISED_BACKENDS = frozenset(
    {
        "ale",
        "envpool",
        "gymnasium",
        "isaac_manager_based",
        "isaac_marl",
        "libero",
        "maniskill",
        "mujoco",
        "pettingzoo",
    }
)
SCALAR_BACKENDS = frozenset({"env_server", "piper"})

# What the learner knows by name, and the buffer that it needs; None: either.
ALGORITHMS = {
    "ppo": "RolloutBuffer",
    "vtrace": "RolloutBuffer",
    "dqn": "ReplayBuffer",
    "sac": "ReplayBuffer",
    "policy": None,
}

_CONTROL_MODES = {
    "google_robot_static": (
        "arm_pd_ee_delta_pose_align_interpolate_by_planner"
        "_gripper_pd_joint_pos_interpolate_by_planner"
    ),
    "widowx": "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos",
}


DEFAULT_POLICY = "default"
"""Name of the policy of those who name none."""

_POLICY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_COLLECTOR = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):[0-9]{1,5}/?")


def check_policy_name(name: str) -> str:
    """Returns the name of a policy as it is.

    Raises:
        ConfigError: It cannot be one.
    """
    if not _POLICY_NAME.fullmatch(name) or set(name) == {"."}:
        raise ConfigError(f"policy: expected a name of 1 to 64 of A-Za-z0-9._-, got {name[:80]!r}")
    return name


class EnvConfig(Config):
    """Configuration of one kind of env.

    Attributes:
        name: What to call it in logs.
        backend: Adapter that hosts it, such as `gymnasium`, or `module:Class` of a `BaseEnv`.
        task: What the adapter shall make; for gymnasium the env's id, `module:Id` imports `module`
            first.
        num_workers: Env workers, each with `num_envs` sub-envs; 0 hosts none, for a cluster whose
            envs attach.
        num_envs: Sub-envs in one worker.
        max_episode_steps: Steps after which an episode is truncated; None: the env's own limit.
        num_cpus: CPUs of a remote worker.
        num_gpus: GPUs of a remote worker.
        env_kwargs: Arguments of the env.
        init_params: Arguments of the simulator, where the adapter has them: not `gymnasium`.
        evaluate_cfg: Values of this section that evaluation uses instead.
        policy_setup: Robot of a ManiSkill task; it decides `init_params.control_mode`.
        seed: Seed of the first reset; None draws one.
        info_keys: What of an env's info goes on to policy and buffer.
        vectorization_mode: Who steps the sub-envs, in gymnasium's words: `sync` one after the
            other, `async` each in a process of its own, `vector_entry_point` a vector env that
            the task brings; `auto` the latter where it gives what single envs do, else `sync`.
            `independent` are processes that do not wait for each other. An adapter that steps its
            rows at once is hosted in one process as a whole with `async`.
        driver: Who steps it at an env server: the `actor` loop there, or an `external` program
            through `EnvService.Step`.
        policy: Which policy acts in it at an env server: `default`, or one of `policy.named`.
        address: Of backend `env_server`: the env server to dial; None: it listens itself.
        auth: What is shown to that server, and expected of it.
        listen: Of backend `env_server` without `address`: where it listens for clients that attach;
            an address, or a mapping as in `services`. Port 0 lets the system choose.
        zmq_port: Documented; the port of `listen`.
        min_clients: Of backend `env_server`: how many envs have to be there before the first reset.
        clients_timeout_s: Seconds that are waited for them.
    """

    name: str
    backend: str
    task: str
    num_workers: int = Field(default=1, ge=0)
    num_envs: int = Field(default=1, ge=1)
    max_episode_steps: int | None = Field(default=None, ge=1)
    num_cpus: int = 1
    num_gpus: float = 0.0
    env_kwargs: Config = Field(default_factory=Config)
    init_params: Config | None = None
    evaluate_cfg: Config | None = None
    policy_setup: str = "widowx"
    seed: int | None = Field(default=None, ge=0)
    info_keys: list[str] = Field(default_factory=lambda: ["episode_info", "episode"])
    vectorization_mode: Literal["auto", "sync", "async", "independent", "vector_entry_point"] = (
        "auto"
    )
    driver: Literal["actor", "external"] = "actor"
    policy: str = DEFAULT_POLICY
    address: str | None = None
    auth: ClientAuthConfig | None = None
    listen: ListenConfig = Field(default_factory=ListenConfig)
    zmq_port: int | None = Field(default=None, ge=0, le=65535)
    min_clients: int = Field(default=1, ge=1)
    clients_timeout_s: float = Field(default=60.0, gt=0)

    @field_validator("listen", mode="before")
    @classmethod
    def make_listener(cls, listen: Any) -> Any:
        """Makes an address a listener."""
        return {"address": listen} if isinstance(listen, str) else listen

    @field_validator("policy")
    @classmethod
    def check_policy(cls, policy: str) -> str:
        """Refuses what cannot be the name of a policy."""
        return check_policy_name(policy)

    @field_validator("address")
    @classmethod
    def check_address(cls, address: str | None) -> str | None:
        """Refuses what nobody can dial."""
        return None if address is None else check_address(address)

    @model_validator(mode="after")
    def check_backend(self) -> Self:
        """Warns about a backend that this library does not know, which may be a user's own."""
        if ":" not in self.backend and self.backend not in VECTORISED_BACKENDS | SCALAR_BACKENDS:
            known = ", ".join(sorted(VECTORISED_BACKENDS | SCALAR_BACKENDS))
            warnings.warn(
                f"unknown env backend '{self.backend}'; known: {known}", UserWarning, stacklevel=2
            )
        return self

    @model_validator(mode="after")
    def check_num_envs(self) -> Self:
        """Refuses several sub-envs where the adapter hosts exactly one."""
        if self.num_envs > 1 and self.backend in SCALAR_BACKENDS:
            raise ValueError(
                "Vectorized environments are only supported by backends "
                f"{', '.join(sorted(VECTORISED_BACKENDS))}; '{self.backend}' needs num_envs 1, "
                f"got {self.num_envs}"
            )
        return self

    @model_validator(mode="after")
    def check_independent(self) -> Self:
        """Refuses rows that come when they are ready where a driver waits for all."""
        if self.vectorization_mode == "independent" and self.driver == "external":
            raise ValueError(
                "vectorization_mode: with driver external, which steps all rows at once, take async"
            )
        return self

    @model_validator(mode="after")
    def set_control_mode(self) -> Self:
        """Sets the control mode of the two known ManiSkill setups."""
        if "maniskill" in self.backend and self.init_params is not None:
            for setup, control_mode in _CONTROL_MODES.items():
                if setup in self.policy_setup:
                    self.init_params.control_mode = control_mode  # type: ignore[attr-defined]
                    break
        return self


class WeightBufferConfig(Config):
    """Where weights wait before they are used; read so that documented files load."""

    type: Literal["WeightBuffer", "CPUWeightBuffer", "ShardedWeightBuffer"] = "WeightBuffer"
    buffer_strategy: Literal["None", "Double", "Shared", "Sharded"] = "Double"

    @model_validator(mode="after")
    def check_strategy(self) -> Self:
        """Refuses a strategy that its buffer type does not offer."""
        needed = {"Shared": "CPUWeightBuffer", "Sharded": "ShardedWeightBuffer"}.get(
            self.buffer_strategy
        )
        if needed is not None and self.type != needed:
            raise ValueError(f"buffer_strategy '{self.buffer_strategy}' needs type '{needed}'")
        return self


class PolicyConfig(Config):
    """Configuration of the policy and of the server that runs it.

    Attributes:
        type: `actor_critic`, `recurrent_actor_critic`, `q_network`, `sac_actor`, another name
            registered in `POLICY`, or `module:Class`.
        backend: Documented; no effect on the policies of this library.
        train_num_gpus: GPUs of the learner.
        eval_num_gpus: GPUs of one policy server.
        model_cfg: Arguments of the network: sizes of its `hidden` layers, `activation`, and what
            docs/learning.md lists for each `type`.
        optim_cfg: Arguments of the optimizer that a `module:Class` makes in `setup_optimizer`;
            `learner.algorithm: policy` trains with it, others make their own, with `train.lr`.
        rollout_mode: Whether `PolicyGroup.rollout_batch` returns responses (`sync`) or futures of
            them (`async`); `rollout_step` is a function in both.
        router_type: Which policy of a `PolicyGroup` answers an env: the one with the fewest
            requests (`simple`), or always the same (`node_affinity`).
        weight_buffer: Where weights wait before they are used.
        policy_kwargs: For a `module:Class` to read.
        initial_weights: `none` lets nobody act before the first publish; `random` acts with fresh
            weights until then. Learners do not learn from rows that such weights acted in.
        state_dir: Directory in which published weights outlive the process; None keeps none.
        restore: Weights to begin with where `state_dir` has none: a safetensors file, the folder of
            a checkpoint, or the `state_dir` of another run. They are version 1, unless the file's
            name tells which.
        named: Further policies of the server, by name, each with what it has otherwise than this
            section, such as a frozen opponent. Each has weights, batches and spaces of its own, and
            answers those who ask for it (`env[].policy`).
        device: `auto` takes CUDA when there is one; else a torch device.
        max_batch_rows: Rows in one inference at most.
        max_wait_us: Microseconds that the oldest row may wait for others to join its batch.
        pad_batches: Let every batch have one of few sizes, the powers of two and `max_batch_rows`,
            each of which is warmed up before the first answer: rows of zeros, whose answers nobody
            sees, fill it. `auto`: on CUDA; `always`, `never`.
        compile: Mode of `torch.compile` for the networks that act: `default`, `reduce-overhead`
            (CUDA graphs, one for each size of batch), `max-autotune`; `none` runs them as they are.
        autocast: Type in which the networks that act compute where torch deems that safe:
            `bfloat16`, `float16`; `none`: that of their weights.
        inline_below_us: On the CPU, batches whose inference is known to take less than this run on
            the event loop, which saves two thread switches; 0: none do.
        queue_rows: Rows that may wait for inference; more are refused.
        queue_bytes: Bytes of the requests that may wait for inference; more are refused.
        max_weights_bytes: Size that published weights may have.
        state: Who has the recurrent state of a policy that keeps some: `kept` by the policy server,
            or `carried` by clients, in requests and answers: it then outlives the server.
        store_state: Whether the state that an action was chosen in is stored with the transition,
            as `state`.
        max_session_state_bytes: Size that the kept state of one session's rows may have.
        max_state_bytes: Size that the kept state of all sessions may have.
        torch_threads: Threads of torch in the policy server.
        seed: Seed of the weights and of sampled actions; None draws one.
    """

    type: str = "actor_critic"
    backend: str = "torch"
    train_num_gpus: float = 1.0
    eval_num_gpus: float = 1.0
    model_cfg: Config = Field(default_factory=lambda: Config(hidden=[64, 64], activation="tanh"))
    optim_cfg: Config = Field(default_factory=Config)
    rollout_mode: Literal["sync", "async"] = "sync"
    router_type: Literal["simple", "node_affinity"] = "simple"
    weight_buffer: WeightBufferConfig = Field(default_factory=WeightBufferConfig)
    policy_kwargs: Config = Field(default_factory=Config)
    initial_weights: Literal["random", "none"] = "none"
    state_dir: str | None = None
    restore: str | None = None
    device: str = "auto"
    max_batch_rows: int = Field(default=4096, ge=1)
    max_wait_us: int = Field(default=0, ge=0)
    pad_batches: Literal["auto", "always", "never"] = "auto"
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = "none"
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    inline_below_us: int = Field(default=200, ge=0)
    queue_rows: int = Field(default=65536, ge=1)
    queue_bytes: int = Field(default=256 * 2**20, ge=1)
    max_weights_bytes: int = Field(default=4 * 2**30, ge=1)
    state: Literal["kept", "carried"] = "kept"
    store_state: bool = False
    max_session_state_bytes: int = Field(default=256 * 2**20, ge=1)
    max_state_bytes: int = Field(default=2**30, ge=1)
    torch_threads: int = Field(default=1, ge=1)
    seed: int | None = None
    named: dict[str, PolicyConfig] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def fill_named(cls, data: Any) -> Any:
        """Gives each named policy what it does not name itself."""
        if not isinstance(data, Mapping) or not isinstance(data.get("named"), Mapping):
            return data
        common = {key: value for key, value in data.items() if key not in _OWN_OF_POLICY}
        named = {
            name: {**common, **(own or {})} if own is None or isinstance(own, Mapping) else own
            for name, own in data["named"].items()
        }
        return {**data, "named": named}

    @field_validator("named")
    @classmethod
    def check_named(cls, named: dict[str, PolicyConfig]) -> dict[str, PolicyConfig]:
        """Refuses names that nobody could ask for, and policies within policies."""
        for name, policy in named.items():
            check_policy_name(name)
            if name == DEFAULT_POLICY:
                raise ValueError("'default' is the policy of the section itself")
            if policy.named:
                raise ValueError(f"{name}: a named policy has none of its own")
        return named

    def by_name(self) -> dict[str, PolicyConfig]:
        """Returns the configuration of each policy; `default` comes first.

        Without a `state_dir` of its own, a named one has a folder in that of the section.
        """
        policies = {DEFAULT_POLICY: self}
        for name, one in self.named.items():
            own = one.state_dir
            if own is None and self.state_dir is not None:
                own = str(Path(self.state_dir) / name)
            policies[name] = one.model_copy(update={"state_dir": own})
        return policies


# What a named policy does not take over from the section.
_OWN_OF_POLICY = frozenset({"named", "state_dir", "restore"})


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


class LogConfig(Config):
    """What is written where.

    Attributes:
        level: Least important log lines to write.
        format: How services write them: `human`; `json`, one object a line; or `auto`, for people
            on a terminal and into a file, and JSON into a pipe.
        backend: Where scalars go: `tensorboard` files in the run's folder, or nowhere (`none`). The
            documented `wandb` and `swanlab` write such files too, and a note names the key.
        project: Documented; names nothing here.
        name: Name of the run: its folder is `<log_dir>/<name>/<n>`; None: the name of the first
            env.
        log_dir: Folder of all runs.
        mode: Documented; no effect here.
        latency: Measure how long each stage takes.
        trace_every: Trace every so many steps of each group into `trace.json` of the run's folder,
            which Perfetto shows; 0: none.
        otlp_endpoint: URL of a collector of OpenTelemetry, such as http://127.0.0.1:4317, to which
            env servers send what they trace as spans, by OTLP over gRPC; None: nowhere. Needs the
            extra `otel`.
    """

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    format: Literal["auto", "human", "json"] = "auto"
    backend: Literal["tensorboard", "wandb", "swanlab", "none"] = "tensorboard"
    project: str | None = None
    name: str | None = None
    log_dir: str = "runs"
    mode: str | None = None
    latency: bool = True
    trace_every: int = Field(default=0, ge=0)
    otlp_endpoint: str | None = None

    @field_validator("otlp_endpoint")
    @classmethod
    def check_otlp_endpoint(cls, endpoint: str | None) -> str | None:
        """Refuses what is no URL of a collector."""
        if endpoint is not None and _COLLECTOR.fullmatch(endpoint) is None:
            raise ValueError(f"expected http://HOST:PORT or https://HOST:PORT, got {endpoint!r}")
        return endpoint

    @model_validator(mode="after")
    def check_traces(self) -> Self:
        """Refuses to send what is not there."""
        if self.otlp_endpoint is not None and not (self.trace_every and self.latency):
            raise ValueError(
                "otlp_endpoint: nothing is traced: set log.trace_every, and leave log.latency on"
            )
        return self

    @field_validator("name")
    @classmethod
    def check_name(cls, name: str | None) -> str | None:
        """Refuses a name that is not the name of one folder."""
        if name is not None and (not name or name in {".", ".."} or "/" in name or "\0" in name):
            raise ValueError(f"expected the name of a folder, got {name!r}")
        return name


class PlacementConfig(Config):
    """Where components run; read so that documented files load."""

    mode: Literal["auto", "manual"] = "auto"
    strategy: Literal["default", "disaggregate", "colocate"] = "default"
    env_strategy: Literal["default", "device-colocate"] = "default"


class ClusterConfig(Config):
    """Workers and placement of a Ray cluster; read so that documented files load."""

    ray_address: str | None = None
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    train_worker_num: int = 1
    eval_worker_num: int = 1
    train_each_gpu_num: float = 1.0
    eval_each_gpu_num: float = 1.0
    buffer_worker_num: int | Literal["auto"] = 1
    remote_train: bool = True
    remote_eval: bool = True
    remote_storage: bool = True
    remote_env: bool = True
    is_colocated: bool = False
    enable_offload: bool = False
    rollout_env_interaction: bool = False
    resource_pool: Config = Field(default_factory=Config)


class MainConfig(Config):
    """A whole config file.

    Attributes:
        engine: Documented; this library's actor loop and learner run side by side.
        env: The envs; one mapping stands for a list of one.
        buffer: Default: a RolloutBuffer.
        policy: The policy and its server.
        train: How long and towards what to train.
        learner: The algorithm.
        log: What is written where.
        services: Addresses, listeners and limits.
        cluster: Documented; Ray clusters.
        debug: Documented; `--debug` decides here.
        verbose: Documented; `--quiet` decides here.
    """

    engine: Literal["asyncrl", "async_rsl", "rsl", "syncrl", "eval"] = "asyncrl"
    env: list[EnvConfig] = Field(default_factory=list)
    buffer: BufferConfig = Field(
        default_factory=lambda: BufferConfig(type="RolloutBuffer", capacity=1_000_000)
    )
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    services: ServicesConfig = Field(default_factory=ServicesConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    debug: bool = True
    verbose: bool = True

    @field_validator("env", mode="before")
    @classmethod
    def listify_env(cls, env: Any) -> Any:
        """Makes one env a list of one."""
        return [env] if isinstance(env, (Mapping, EnvConfig)) else env

    @field_validator("buffer", mode="before")
    @classmethod
    def fill_buffer(cls, buffer: Any) -> Any:
        """Lets a file name only what differs from the default buffer."""
        if isinstance(buffer, Mapping):
            return {"type": "RolloutBuffer", "capacity": 1_000_000, **buffer}
        return buffer

    @model_validator(mode="after")
    def check_shards(self) -> Self:
        """Refuses one address for several buffer servers."""
        if self.buffer.storage.type == "sharded" and self.services.buffer.address is not None:
            raise ValueError(
                "services.buffer.address names one server; those of sharded storage are in "
                "buffer.storage.addresses"
            )
        return self

    @property
    def sampled(self) -> BufferConfig:
        """The section of the table that the learner samples."""
        return self.buffer.tables.get(self.learner.table, self.buffer)

    @property
    def buffer_addresses(self) -> list[str]:
        """Where the buffer servers are dialled: one, or one for each shard.

        Raises:
            ConfigError: No port is named, or no server of sharded storage.
        """
        if self.buffer.storage.type == "sharded" and not self.buffer.storage.addresses:
            raise ConfigError("no buffer server to dial: buffer.storage.addresses is empty")
        return self.buffer.storage.addresses or [self.services.buffer.dial_address]
