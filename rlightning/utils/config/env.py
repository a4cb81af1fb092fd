"""Section `env`: what is hosted, or taken in, and how it is stepped."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from rlightning.utils.config.base import Config
from rlightning.utils.config.policy import DEFAULT_POLICY, check_policy_name
from rlightning.utils.config.rpc import ClientAuthConfig, ListenConfig, check_address

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

_CONTROL_MODES = {
    "google_robot_static": (
        "arm_pd_ee_delta_pose_align_interpolate_by_planner"
        "_gripper_pd_joint_pos_interpolate_by_planner"
    ),
    "widowx": "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos",
}


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
