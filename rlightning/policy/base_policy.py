"""The base of every policy: which methods a user writes, and how they are called."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlightning.errors import ConfigError, PolicyError
from rlightning.latency import LatencyStats
from rlightning.policy.turns import Turns
from rlightning.policy.weight_store import write_atomically
from rlightning.policy.weights import (
    check_weights,
    dump_weights,
    load_weights,
    parse_weights,
    policy_weights,
)
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse
from rlightning.utils.config import Config, PolicyConfig, TrainConfig

_LOG = logging.getLogger(__name__)


class PolicyRole(str, Enum):
    """What an instance of a policy is for."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(eq=False)
class PolicyInput(EnvRet):
    """What `rollout_step` gets: the rows of all groups that share one inference.

    `observation` has the structure of the observation space; its leaves are tensors [B, ...] on the
    policy's device, valid only during the call: clone what is to be kept. Spaces without a fixed
    shape (Text, Sequence, Graph) give lists of B values. `last_reward` is float32 [B],
    `last_terminated` and `last_truncated` are bool [B], by agent for multi-agent envs. Nothing else
    of the groups' EnvRets is there.
    """

    mode: Mode = field(default=Mode.EXPLORE, kw_only=True)
    """Whether to draw from the distribution (explore) or to take the best action (exploit)."""
    state: Any = field(default=None, kw_only=True)
    """What the policy remembers of the rows: the nest of `initial_state` with leaves [B, ...]; None
    for a policy that keeps no state."""
    groups: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)
    """Env id and number of rows of each group, in the order of the rows."""

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Returns the names of the fields that are data of the env, as `EnvRet.fields`."""
        return EnvRet.fields()

    @property
    def env_ids(self) -> list[str]:
        """The env id of each of the B rows; empty for rows that only fill a batch."""
        return [env_id for env_id, rows in self.groups for _ in range(rows)]


class BasePolicy(ABC):
    """A policy that a user writes: a network and how to act with it.

    Methods are called from one thread at a time, though not always the same one.

    Args:
        config: Section `policy` of the configuration.
        role_type: Whether this instance acts (`eval`) or is trained (`train`).

    Attributes:
        config: As given.
        role: As given.
        device: Where the network and the inputs of `rollout_step` are.
        env_meta: Spaces of the envs; None before `init_eval` or `init_train`.
        weights_version: Version of the weights that it acts with; 0 before any were received.
        latency: How long its rollouts in a `PolicyGroup` took, in the last minute.
        turns: In which it does what a `PolicyGroup` asks of it.

    Raises:
        ValueError: `role_type` is neither.
        ConfigError: `config.device` names a device that is not there.
    """

    def __init__(self, config: PolicyConfig, role_type: PolicyRole | str) -> None:
        self.config = config
        self.role = PolicyRole(role_type)
        self.device = _choose_device(config.device)
        self.env_meta: EnvMeta | None = None
        self.weights_version = 0
        self.latency = LatencyStats()
        self.turns = Turns()
        self._received: tuple[dict[str, Tensor], int] | None = None
        self._update: Future[None] | None = None
        # State dicts of optimizers, and what of them `reload` moves back.
        self._offloaded: list[tuple[dict[str, Any], str]] = []

    # What a user writes.

    @abstractmethod
    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        """Makes the network's modules as attributes of `self`, for the spaces in `env_meta`.

        Modules that are made on another device than `self.device` are moved there afterwards.
        """

    @abstractmethod
    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        """Acts on a batch, under `torch.inference_mode`.

        Args:
            env_ret: A `PolicyInput`: leaves [B, ...] on `self.device`, `mode`, `env_ids`, `state`.

        Returns:
            A response whose every leaf is a tensor or array [B, ...]: `action` and whatever else is
            to be stored with the transition. It is split and sent to whom each row belongs. A
            policy that keeps state adds `next_state`, what it remembers from here on: a nest like
            `env_ret.state`. That is kept for the next step of each row, and not sent.
        """

    def initial_state(self, num_rows: int) -> Any:
        """Returns what the policy remembers at the beginning of an episode.

        None, unless overridden: the policy keeps no state. One that is recurrent, or looks at the
        last observations, returns a tensor, or a dict or tuple of such, with the leading
        dimension `num_rows`, the same for every row. `rollout_step` gets it as `env_ret.state`,
        of each row its own, whatever shares the batch, and returns `next_state`. A row begins with
        it again when its episode has ended, or when what came before is lost. A swap of weights
        does not change what is remembered.

        Args:
            num_rows: The leading dimension.
        """
        return None

    def postprocess(
        self, env_ret: EnvRet | None = None, policy_resp: PolicyResponse | None = None
    ) -> PolicyResponse | None:
        """Returns the response as it is to be stored; unchanged unless overridden."""
        return policy_resp

    def seed_actions(self, seed: int) -> None:
        """Begins the random numbers of drawn actions anew; called in lockstep only.

        Here those of torch are meant; override it where `rollout_step` draws from others.
        """
        torch.manual_seed(seed)

    def setup_optimizer(self, optim_cfg: Config) -> None:  # noqa: B027 - optional
        """Makes the optimizers; called by `init_train` once the network exists."""

    def update_dataset(self, data: Any) -> None:
        """Takes the sample that the next `train` learns from."""
        raise NotImplementedError(f"{type(self).__name__} does not train itself: no update_dataset")

    def train(self) -> dict[str, float] | None:
        """Learns from what `update_dataset` took and returns figures to log."""
        raise NotImplementedError(f"{type(self).__name__} does not train itself: no train")

    def get_trainable_parameters(self) -> dict[str, dict[str, Tensor]]:
        """Returns the weights that are published: the state dict of each trainable module.

        They are live: tensors of the network itself, buffers included.
        """
        return {name: dict(module.state_dict()) for name, module in self.model_list.items()}

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Takes weights over, in the structure of `get_trainable_parameters`.

        Names and shapes were checked before. Must take all or nothing.
        """
        modules = self.model_list
        for name, state in state_dict.items():
            modules[name].load_state_dict(state)

    # What a user calls.

    @property
    def model_list(self) -> dict[str, nn.Module]:
        """Returns the attributes that are modules with trainable parameters, by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, nn.Module) and any(p.requires_grad for p in value.parameters())
        }

    @property
    def is_initialized(self) -> bool:
        """Returns whether the network exists."""
        return self.env_meta is not None

    def init_eval(self, eval_config: Config | None = None, env_meta: EnvMeta | None = None) -> None:
        """Makes the network, ready to act.

        Args:
            eval_config: Passed on to `construct_network` as keywords.
            env_meta: Spaces of the envs that will ask.
        """
        self._construct(env_meta, **(eval_config.to_dict() if eval_config is not None else {}))
        for module in self._modules():
            module.eval()

    def init_train(
        self, train_config: TrainConfig | None = None, env_meta: EnvMeta | None = None
    ) -> None:
        """Makes the network and its optimizer, ready to be trained.

        Args:
            train_config: How to train; its learning rate is the default of `policy.optim_cfg`.
            env_meta: Spaces of the envs whose data it will see.
        """
        self._construct(env_meta)
        for module in self._modules():
            module.train()
        optim_cfg = self.config.optim_cfg.model_copy()
        if train_config is not None and "lr" not in optim_cfg.to_dict():
            optim_cfg = Config(**{"lr": train_config.lr, **optim_cfg.to_dict()})
        self.setup_optimizer(optim_cfg)

    def reset_training_state(
        self,
        train_config: TrainConfig | None = None,
        env_meta: EnvMeta | None = None,
        seed: int | None = None,
    ) -> None:
        """Makes network and optimizer anew, as `init_train` did: what a warm-up trained is gone.

        Args:
            train_config: As for `init_train`.
            env_meta: Spaces of the envs; those of before if None.
            seed: Replaces `policy.seed`, and seeds torch while the network is made; None: neither.
        """
        meta = self.env_meta if env_meta is None else env_meta
        if seed is None:
            self.init_train(train_config, meta)
            return
        self.config = self.config.model_copy(update={"seed": seed})
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.init_train(train_config, meta)

    def save_checkpoint(self, path: str | Path) -> None:
        """Writes the weights as a safetensors file, atomically."""
        write_atomically(Path(path), dump_weights(policy_weights(self)))

    def load_checkpoint(self, path: str | Path) -> None:
        """Takes over the weights that `save_checkpoint` wrote.

        Raises:
            InvalidRequestError: The file holds something else, or they do not fit the network; the
                weights are what they were.
        """
        load_weights(self, parse_weights(Path(path).read_bytes()))

    def get_param_fingerprint(self) -> dict[str, float]:
        """Returns the L2 norm of each published tensor, by name."""
        return fingerprint(policy_weights(self))

    # Acting, as a `PolicyGroup` lets it: requests, and weights that change between them.

    def receive_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Takes a copy of weights to its device, to be used from `notify_update_weights` on.

        Args:
            weights: Tensors by flat name, as `policy_weights` returns them.
            version: Of the policy that they are of.

        Raises:
            InvalidRequestError: They do not fit the network.
        """
        check_weights(policy_weights(self), weights)
        copies = {k: v.detach().to(self.device, copy=True) for k, v in weights.items()}
        self._received = copies, version

    def notify_update_weights(self) -> None:
        """Lets it act with the weights that it received last, from the next rollout on."""
        received, self._received = self._received, None

        def update() -> None:
            if received is not None:
                load_weights(self, received[0])
                self.weights_version = received[1]

        self._update = self.turns.run(update)

    def wait_for_weight_update_done(self, timeout: float = 60.0) -> bool:
        """Returns whether it acts with what `notify_update_weights` told it to, once it does.

        Args:
            timeout: How long to wait, in seconds.

        Raises:
            RLightningError: It could not take them.
        """
        if self._update is None:
            return True
        if wait([self._update], timeout).not_done:
            return False
        self._update.result()
        return True

    def get_num_requests(self) -> int:
        """Returns how many requests wait for its answer; each env's is one."""
        return self.turns.load

    def check_idle(self) -> bool:
        """Returns whether nothing waits for its answer."""
        return self.turns.load == 0

    def print_timing_summary(self, reset: bool = False) -> None:
        """Logs how long its rollouts took in the last minute, at level DEBUG.

        Args:
            reset: Begin again from nothing.
        """
        for name, figures in self.latency.summary().items():
            _LOG.debug("policy %s: %s", name, figures)
        if reset:
            self.latency = LatencyStats()

    def offload(self) -> None:
        """Moves networks and the state of optimizers to the CPU, and so frees the device."""
        for module in self._modules():
            module.to("cpu")
        for value in vars(self).values():
            if not isinstance(value, torch.optim.Optimizer):
                continue
            for state in value.state.values():
                for name, tensor in state.items():
                    # Some of it is on the CPU by itself, and must stay there.
                    if isinstance(tensor, Tensor) and not tensor.is_cpu:
                        state[name] = tensor.cpu()
                        self._offloaded.append((state, name))

    def reload(self) -> None:
        """Moves back what `offload` moved."""
        for module in self._modules():
            module.to(self.device)
        for state, name in self._offloaded:
            state[name] = state[name].to(self.device)
        self._offloaded.clear()

    def _modules(self) -> list[nn.Module]:
        return [value for value in vars(self).values() if isinstance(value, nn.Module)]

    def _construct(self, env_meta: EnvMeta | None, **kwargs: Any) -> None:
        if env_meta is None:
            raise PolicyError(f"{type(self).__name__}: env_meta is needed to make the network")
        self.construct_network(env_meta, **kwargs)
        for module in self._modules():
            module.to(self.device)
        if self.role is PolicyRole.EVAL and self.config.compile != "none":
            for module in self.model_list.values():
                module.compile(mode=self.config.compile)
        self.env_meta = env_meta


def fingerprint(weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the L2 norm of each tensor, by name."""
    return {
        name: float(torch.linalg.vector_norm(tensor.detach().to(torch.float64)))
        for name, tensor in weights.items()
    }


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"policy.device: not a torch device: '{name}'") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"policy.device is '{name}', but torch finds no CUDA device")
    return device
