"""Names documented keys that a config sets though nothing here acts on them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from rlightning.utils.config.base import Config
from rlightning.utils.config.config import MainConfig
from rlightning.utils.config.env import EnvConfig
from rlightning.utils.config.learner import TrainConfig
from rlightning.utils.config.log import LogConfig
from rlightning.utils.config.policy import PolicyConfig

# They are read so that documented files load; each leaves this list with the code that honours it.
_WITHOUT_EFFECT: dict[type[Config], frozenset[str]] = {
    MainConfig: frozenset({"engine", "cluster", "debug", "verbose"}),
    EnvConfig: frozenset({"num_cpus", "num_gpus"}),
    PolicyConfig: frozenset(
        {
            "backend",
            "train_num_gpus",
            "eval_num_gpus",
            "rollout_mode",
            "router_type",
            "weight_buffer",
        }
    ),
    TrainConfig: frozenset({"max_rollout_steps", "max_eval_rollout_steps", "eval_interval"}),
    LogConfig: frozenset({"project", "mode"}),
}

# Values of a key that has an effect with others.
_VALUES_WITHOUT_EFFECT: dict[type[Config], dict[str, frozenset[str]]] = {
    LogConfig: {"backend": frozenset({"wandb", "swanlab"})},
}

# These are for classes of the user's own, `module:Class`, which get the whole section.
_FOR_OWN_CLASSES: dict[type[Config], tuple[str, frozenset[str]]] = {
    EnvConfig: ("backend", frozenset({"init_params", "policy_setup"})),
    PolicyConfig: ("type", frozenset({"optim_cfg", "policy_kwargs"})),
}


def keys_without_effect(
    config: Config, prefix: str = "", *, honoured: Collection[str] = ()
) -> Iterator[str]:
    """Yields the dotted name of every key that differs from its default, to no effect.

    Args:
        config: A config.
        prefix: What stands before its keys.
        honoured: Keys that the launcher of the run heeds and others do not; of a list, without the
            number.
    """
    ignored = _WITHOUT_EFFECT.get(type(config), frozenset())
    values = _VALUES_WITHOUT_EFFECT.get(type(config), {})
    chooser, own = _FOR_OWN_CLASSES.get(type(config), ("", frozenset()))
    if chooser and ":" not in getattr(config, chooser):
        ignored |= own
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if name in ignored:
            if re.sub(r"\.\d+\.", ".", prefix + name) in honoured:
                continue
            if value != field.get_default(call_default_factory=True):
                yield prefix + name
            continue
        if name in values and value in values[name]:
            yield prefix + name
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if isinstance(child, Config):
                inner = f"{prefix}{name}.{index}." if child is not value else f"{prefix}{name}."
                yield from keys_without_effect(child, inner, honoured=honoured)
