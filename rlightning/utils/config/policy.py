"""Section `policy`: the networks that act, their server, and further policies by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from rlightning.errors import ConfigError
from rlightning.utils.config.base import Config

DEFAULT_POLICY = "default"
"""Name of the policy of those who name none."""

_POLICY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_policy_name(name: str) -> str:
    """Returns the name of a policy as it is.

    Raises:
        ConfigError: It cannot be one.
    """
    if not _POLICY_NAME.fullmatch(name) or set(name) == {"."}:
        raise ConfigError(f"policy: expected a name of 1 to 64 of A-Za-z0-9._-, got {name[:80]!r}")
    return name


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
            and `max-autotune` (both with CUDA graphs, one for each size of batch, for which servers
            need torch 2.13); `none` runs them as they are.
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
