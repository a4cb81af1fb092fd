"""Batches of few sizes, compiled networks and less precision: what is asked for is answered alike."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlightning.policy import BasePolicy, LocalPolicy, PolicyHost, build_policy
from rlightning.policy.base_policy import PolicyInput
from rlightning.policy.inference import Inference, Part
from rlightning.policy.layout import InputLayout
from rlightning.policy.state import GroupState, StateLayout, StateUse
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse
from rlightning.utils.config import Config, PolicyConfig
from tests.unit.policy.policies import VECTOR, Echo, Remembering, env_ret, meta

PICTURES = gym.spaces.Box(0, 255, (4, 12, 12), np.uint8)
CNN = {"convolutions": [[4, 4, 2], [8, 3, 1]], "features": 16, "hidden": []}
CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")],
)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])


class Chunks(BasePolicy):
    """Three actions to each row, and the rows that it saw."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 6)
        self.seen: list[int] = []

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        assert isinstance(env_ret, PolicyInput)
        self.seen.append(len(env_ret.observation))
        assert len(env_ret.env_ids) == len(env_ret.observation)
        chunk = self.net(env_ret.observation).reshape(-1, 3, 2)
        return PolicyResponse(env_ret.env_id, action=chunk)


def infer(policy: BasePolicy, space: Any, rets: list[EnvRet], states: Any = None) -> list[Any]:
    """Answers all of them in one batch; `states` are as many groups'."""
    layout = InputLayout(space)
    layouts = StateLayout.of(policy)
    parts = [Part(ret.env_id, *layout.flatten(ret)) for ret in rets]
    for part, state in zip(parts, states or (), strict=False):
        part.state = StateUse(state, np.arange(part.rows or 1), None, fresh=False)
    return Inference(policy, layout, layouts).run(parts, Mode.EXPLOIT)


def make(kind: str, **config: Any) -> tuple[BasePolicy, Any]:
    classes: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "mlp": ("actor_critic", VECTOR, {}),
        "cnn": ("actor_critic", PICTURES, CNN),
        "gru": ("recurrent_actor_critic", VECTOR, {"memory": 8}),
        "chunked": (f"{__name__}:Chunks", VECTOR, {}),
    }
    name, space, model_cfg = classes[kind]
    chosen = PolicyConfig(**{"device": "cpu", "seed": 2, **config}, type=name)
    chosen = chosen.model_copy(update={"model_cfg": Config(**model_cfg)})
    policy = build_policy(chosen, "eval")
    policy.init_eval(env_meta=EnvMeta("a", gym.spaces.Discrete(3), space, 8))
    return policy, space


def observations(space: Any, rows: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    if space is PICTURES:
        return rng.integers(0, 256, (rows, *space.shape), np.uint8)
    return rng.standard_normal((rows, 4), np.float32)


@DEVICES
@pytest.mark.parametrize("pad_batches", ["never", "always"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "gru", "chunked"])
def test_a_row_is_answered_the_same_whatever_shares_its_batch(
    kind: str, pad_batches: str, device: str
) -> None:
    policy, space = make(kind, pad_batches=pad_batches, device=device)
    reference, _ = make(kind)
    seen = observations(space, 13)
    counts = (3, 1, 9)
    alone: dict[str, list[Any]] = {}
    groups = {i: GroupState(1) for i in range(13)}
    together = [GroupState(count) for count in counts]
    for turn in range(2):  # with a state from the second on
        seen = seen[::-1].copy()
        alone = {}
        for i in range(13):
            (one,) = infer(reference, space, [EnvRet("a", seen[i : i + 1])], [groups[i]])
            for name, value in one.to_dict().items():
                alone.setdefault(name, []).append(value)
        starts = np.cumsum([0, *counts])
        rets = [EnvRet("b", seen[a:b]) for a, b in pairwise(starts)]
        answers = infer(policy, space, rets, together)
        assert [len(answer.action) for answer in answers] == [3, 1, 9]
        for name, rows in alone.items():
            got = np.concatenate([getattr(answer, name) for answer in answers])
            atol = 1e-5 if device == "cpu" else 1e-3
            np.testing.assert_allclose(got, np.concatenate(rows), atol=atol, err_msg=str(turn))


def test_batches_have_few_sizes_and_all_were_warmed_up_before_the_first_answer() -> None:
    async def act() -> list[int]:
        config = PolicyConfig(
            type=f"{__name__}:Chunks",
            device="cpu",
            pad_batches="always",
            max_batch_rows=12,
            initial_weights="random",
        )
        host = PolicyHost(config)
        await host.start()
        local = LocalPolicy(host, meta(5))
        await local.start()
        seen: list[int] = host._policy.seen  # type: ignore[attr-defined]
        warm = sorted(set(seen))
        seen.clear()
        assert warm == [1, 2, 4, 8, 12]
        for rows in (5, 1, 9, 12, 30):
            assert (await local.act(env_ret(rows))).action.shape == (rows, 3, 2)
        await local.close()
        await host.close()
        return seen

    assert asyncio.run(act()) == [8, 1, 12, 12, 30]


def test_what_is_wrong_with_padding_alone_harms_nobody() -> None:
    class Inverse(Echo):
        def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
            assert isinstance(env_ret, PolicyInput)
            assert env_ret.env_ids == ["env"] * 3 + [""]
            return PolicyResponse(env_ret.env_id, action=0.0 / env_ret.observation[:, 0])

    policy = Inverse(PolicyConfig(device="cpu", pad_batches="always"), "eval")
    policy.init_eval(env_meta=meta())
    (answer,) = infer(policy, VECTOR, [env_ret(3)])
    assert answer.action.tolist() == [0, 0, 0]


def test_padding_leaves_no_trace_in_what_is_remembered() -> None:
    policy = Remembering(PolicyConfig(device="cpu", pad_batches="always"), "eval")
    policy.init_eval(env_meta=meta())
    group = GroupState(3)
    for turn in (1, 2):
        (answer,) = infer(policy, VECTOR, [EnvRet("a", np.ones((3, 4), np.float32))], [group])
        assert answer.total.tolist() == [turn] * 3


@DEVICES
@pytest.mark.parametrize("kind", ["cnn", "gru"])
def test_networks_may_compute_in_another_type(kind: str, device: str) -> None:
    policy, space = make(kind, autocast="bfloat16", device=device)
    reference, _ = make(kind)
    ret = EnvRet("a", observations(space, 4))
    (got,), (expected,) = (infer(one, space, [ret], [GroupState(4)]) for one in (policy, reference))
    assert got.value.dtype == np.float32
    np.testing.assert_allclose(got.value, expected.value, atol=0.03)
    assert (got.value != expected.value).any()


def test_networks_that_act_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    compile_module = nn.Module.compile

    def compile_without_code(self: nn.Module, *, mode: str) -> None:
        modes.append(mode)
        compile_module(self, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", compile_without_code)
    policy, space = make("mlp", compile="reduce-overhead")
    reference, _ = make("mlp")
    ret = EnvRet("a", observations(space, 4))
    (got,), (expected,) = (infer(one, space, [ret]) for one in (policy, reference))
    np.testing.assert_allclose(got.value, expected.value, atol=1e-5)
    assert modes == ["reduce-overhead"] * 2
    assert set(policy.get_param_fingerprint()) == set(reference.get_param_fingerprint())
