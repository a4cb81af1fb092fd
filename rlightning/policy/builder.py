"""Makes policies by the name that a config gives them."""

from __future__ import annotations

from importlib import import_module

from rlightning.errors import ConfigError
from rlightning.policy import (  # noqa: F401 - for their names
    actor_critic,
    q_network,
    recurrent_actor_critic,
    sac_actor,
)
from rlightning.policy.base_policy import BasePolicy, PolicyRole
from rlightning.policy.policy_group import PolicyGroup
from rlightning.utils.config import ClusterConfig, PolicyConfig
from rlightning.utils.registry import POLICY


def build_policy(config: PolicyConfig, role_type: PolicyRole | str) -> BasePolicy:
    """Returns the policy that `config.type` names, without a network yet.

    Raises:
        ConfigError: No such name is registered, or `module:Class` cannot be imported or is no
            `BasePolicy`.
    """
    return find_policy(config.type)(config, role_type)


def find_policy(name: str) -> type[BasePolicy]:
    """Returns the class that a registered name or `module:Class` stands for.

    Raises:
        ConfigError: There is none.
    """
    module_name, colon, class_name = name.partition(":")
    if not colon:
        try:
            found = POLICY.get(name)
        except KeyError as error:
            raise ConfigError(f"policy.type: {error.args[0]}, or module:Class") from error
    else:
        try:
            found = getattr(import_module(module_name), class_name)
        except Exception as error:  # a user's module may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"policy.type '{name}' cannot be loaded: {reason}") from error
    if not (isinstance(found, type) and issubclass(found, BasePolicy)):
        raise ConfigError(f"policy.type '{name}' is no subclass of BasePolicy")
    return found


def build_policy_group(
    policy_type: str, config: PolicyConfig, cluster: ClusterConfig | None = None
) -> PolicyGroup:
    """Returns a group of local policies, without networks yet.

    Args:
        policy_type: As `policy.type`.
        config: Section `policy`.
        cluster: Section `cluster`: how many policies train and act; default: one each.

    Raises:
        ConfigError: As `build_policy`.
    """
    make = find_policy(policy_type)
    train_count, eval_count = (
        (1, 1) if cluster is None else (cluster.train_worker_num, cluster.eval_worker_num)
    )
    return PolicyGroup(
        [make(config, PolicyRole.TRAIN) for _ in range(train_count)],
        [make(config, PolicyRole.EVAL) for _ in range(eval_count)],
        config,
    )
