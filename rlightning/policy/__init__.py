"""Policies: what turns observations into actions, batched, with versioned weights.

Names are loaded on first use, so that a robot with the base install can import this package for
`PolicyClient`: most others need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlightning.utils.lazy import lazy_names

if TYPE_CHECKING:
    from rlightning.policy.actor_critic import ActorCriticPolicy
    from rlightning.policy.base_policy import BasePolicy, PolicyInput, PolicyRole
    from rlightning.policy.blocking import RemotePolicy
    from rlightning.policy.builder import build_policy, build_policy_group
    from rlightning.policy.calls import PolicyDescription
    from rlightning.policy.fleet import PolicyFleet
    from rlightning.policy.host import PolicyHost
    from rlightning.policy.hosts import PolicyHosts
    from rlightning.policy.local_policy import LocalPolicy
    from rlightning.policy.policy_group import PolicyGroup
    from rlightning.policy.publisher import WeightPublisher
    from rlightning.policy.q_network import QNetworkPolicy
    from rlightning.policy.recurrent_actor_critic import RecurrentActorCriticPolicy
    from rlightning.policy.remote_policy import PolicyClient
    from rlightning.policy.sac_actor import SACActorPolicy
    from rlightning.policy.weights import dump_weights, policy_weights

__all__ = [
    "ActorCriticPolicy",
    "BasePolicy",
    "LocalPolicy",
    "PolicyClient",
    "PolicyDescription",
    "PolicyFleet",
    "PolicyGroup",
    "PolicyHost",
    "PolicyHosts",
    "PolicyInput",
    "PolicyRole",
    "QNetworkPolicy",
    "RecurrentActorCriticPolicy",
    "RemotePolicy",
    "SACActorPolicy",
    "WeightPublisher",
    "build_policy",
    "build_policy_group",
    "dump_weights",
    "policy_weights",
]

_MODULES = {
    "ActorCriticPolicy": "actor_critic",
    "BasePolicy": "base_policy",
    "LocalPolicy": "local_policy",
    "PolicyClient": "remote_policy",
    "PolicyDescription": "calls",
    "PolicyFleet": "fleet",
    "PolicyGroup": "policy_group",
    "PolicyHost": "host",
    "PolicyHosts": "hosts",
    "PolicyInput": "base_policy",
    "PolicyRole": "base_policy",
    "QNetworkPolicy": "q_network",
    "RemotePolicy": "blocking",
    "RecurrentActorCriticPolicy": "recurrent_actor_critic",
    "SACActorPolicy": "sac_actor",
    "WeightPublisher": "publisher",
    "build_policy": "builder",
    "build_policy_group": "builder",
    "dump_weights": "weights",
    "policy_weights": "weights",
}

__getattr__ = lazy_names(__name__, _MODULES, extra="policy", libraries={"torch", "safetensors"})
