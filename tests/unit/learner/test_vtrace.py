"""V-trace: equal to returns where nothing has to be corrected, and to TorchRL's module."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives.value.functional import generalized_advantage_estimate

from rlightning.learner.vtrace import correct_advantages
from tests.unit.learner.test_ppo import make_columns, make_ppo

T, N = 6, 4


def rollout(seed=0, **changed):
    generator = torch.Generator().manual_seed(seed)
    names = ("log_prob", "behaviour_log_prob", "value", "next_value", "reward")
    data = {name: torch.randn(T, N, generator=generator) for name in names}
    flags = {name: torch.zeros(T, N, dtype=torch.bool) for name in ("terminated", "stop")}
    return {**data, **flags, "own": torch.ones(T, N, dtype=torch.bool), **changed}


def test_of_the_policy_itself_it_is_the_return():
    data = rollout(value=torch.zeros(T, N))
    data["next_value"] = torch.cat([data["value"][1:], torch.randn(1, N)])
    data["behaviour_log_prob"] = data["log_prob"]
    data["stop"][2, 1] = data["terminated"][2, 1] = True
    _, target = correct_advantages(0.9, 1.0, 1.0, **data)
    _, expected = generalized_advantage_estimate(
        0.9,
        1.0,
        *(data[name] for name in ("value", "next_value", "reward", "stop", "terminated")),
    )
    assert torch.allclose(target, expected, atol=1e-6)


def test_it_equals_a_recursion_by_hand():
    data = rollout(seed=3)
    ratio = (data["log_prob"] - data["behaviour_log_prob"]).exp()
    rho, c = ratio.clamp(max=0.8), ratio.clamp(max=0.5)
    delta = rho * (data["reward"] + 0.9 * data["next_value"] - data["value"])
    expected = torch.zeros(T, N)
    after = torch.zeros(N)
    for t in reversed(range(T)):
        after = delta[t] + 0.9 * c[t] * after
        expected[t] = data["value"][t] + after
    _, target = correct_advantages(0.9, 0.8, 0.5, **data)
    assert torch.allclose(target, expected, atol=1e-5)


def test_nothing_reaches_back_over_what_stops_or_over_anothers_action():
    for name, row in (("stop", 3), ("own", 4)):
        data = rollout(seed=1)
        data[name][row] = ~data[name][row]
        late = {**data, "reward": data["reward"].clone()}
        late["reward"][4:] += 10.0
        first, second = (correct_advantages(0.9, 1.0, 1.0, **one)[1] for one in (data, late))
        assert torch.equal(first[:4], second[:4]), name


def test_old_rollouts_are_learned_from_in_the_measure_of_the_ratio():
    learner = make_ppo(algorithm="vtrace")
    columns = make_columns()
    metrics = learner.update({**columns, "log_prob": columns["log_prob"] + 20.0})
    # The policy would hardly have acted so: almost nothing is left of the advantages.
    assert metrics["losses/approx_kl"] == pytest.approx(0.0, abs=0.2)
    rollout = learner._read({**columns, "log_prob": columns["log_prob"] + 20.0})
    rollout["value"] = rollout["next_value"] = torch.zeros(rollout.shape)
    advantage, target = learner._estimate(rollout)
    assert isinstance(rollout, TensorDict)
    assert advantage.abs().max() < 1e-6
    assert target.abs().max() < 1e-6
