"""PPO: advantages at the ends of episodes, masking, seeds, and that it learns."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.errors import ConfigError, PolicyError
from rlightning.learner import build_learner
from rlightning.learner.ppo import estimate_advantages
from rlightning.learner.state_file import dump_state, load_state
from rlightning.policy import ActorCriticPolicy
from rlightning.policy.weights import load_weights, parse_weights
from rlightning.types import ActionSource, EnvMeta
from rlightning.utils.config import MainConfig

VECTOR = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
TWO = gym.spaces.Discrete(2)
T, N = 8, 16


def make_ppo(*, seed=0, action=TWO, observation=VECTOR, train=None, policy=None, **learner):
    config = MainConfig.from_dict(
        {
            "policy": {"seed": 1, "device": "cpu", "model_cfg": {"hidden": [16]}, **(policy or {})},
            "train": {"seed": seed, "lr": 0.01, "batch_size": 32, **(train or {})},
            "learner": learner,
        }
    )
    return build_learner(config, EnvMeta("env", action, observation, N))


def make_columns(rng=0, **overrides):
    rng = np.random.default_rng(rng)
    flags = np.zeros((T, N), bool)
    return {
        "observation": rng.uniform(-1, 1, (T, N, 3)).astype(np.float32),
        "next_observation": rng.uniform(-1, 1, (T, N, 3)).astype(np.float32),
        "action": rng.integers(0, 2, (T, N)),
        "log_prob": np.full((T, N), np.log(0.5), np.float32),
        "reward": rng.normal(size=(T, N)).astype(np.float32),
        "terminated": flags.copy(),
        "truncated": flags.copy(),
        "cut": flags.copy(),
        "action_source": np.full((T, N), ActionSource.POLICY, np.int8),
        **overrides,
    }


def flag(*where):
    flags = np.zeros((T, N), bool)
    for t, n in where:
        flags[t, n] = True
    return flags


def weights_after(columns, **config):
    ppo = make_ppo(**config)
    ppo.update(columns)
    return ppo.weights()


def edited(columns, name, where, value):
    column = columns[name].copy()
    column[where] = value
    return {**columns, name: column}


# Advantages: gamma 0.5, lambda 0.5; the deltas are 1, 0.5, 0, -0.5 where nothing ends.


@pytest.mark.parametrize(
    ("terminated", "stop", "other", "expected"),
    [
        pytest.param([], [], [], [1.1171875, 0.46875, -0.125, -0.5], id="one episode"),
        pytest.param([1], [1], [], [0.75, -1.0, -0.125, -0.5], id="terminated: no bootstrap"),
        pytest.param([], [1], [], [1.125, 0.5, -0.125, -0.5], id="truncated or cut: bootstrap"),
        pytest.param([], [], [2], [1.125, 0.5, -0.125, -0.5], id="the next action is another's"),
        pytest.param([3], [3], [], [1.078125, 0.3125, -0.75, -3.0], id="terminated at the end"),
    ],
)
def test_advantages_equal_those_computed_by_hand(terminated, stop, other, expected):
    def at(steps):
        return torch.tensor([[t in steps] for t in range(4)])

    value = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    advantage, target = estimate_advantages(
        0.5,
        0.5,
        value=value,
        next_value=torch.tensor([[2.0], [3.0], [4.0], [5.0]]),
        reward=torch.ones(4, 1),
        terminated=at(terminated),
        stop=at(stop),
        own=~at(other),
    )
    assert advantage[:, 0].tolist() == expected
    assert torch.equal(target, advantage + value)


def test_rows_of_one_env_say_nothing_about_another():
    def estimate(**changed):
        tensors = {"value": 1.0, "next_value": 2.0, "reward": 1.0}
        tensors = {name: torch.full((4, 2), x) for name, x in tensors.items()}
        flags = {name: torch.zeros(4, 2, dtype=torch.bool) for name in ("terminated", "stop")}
        flags["own"] = torch.ones(4, 2, dtype=torch.bool)
        for name, row in changed.items():
            flags[name][row] = ~flags[name][row]
        return estimate_advantages(0.9, 0.9, **tensors, **flags)[0]

    plain = estimate()
    ended = estimate(terminated=(1, 0), stop=(1, 0))
    assert torch.equal(plain[:, 1], ended[:, 1])
    assert not torch.equal(plain[:, 0], ended[:, 0])


@pytest.mark.parametrize("name", ["truncated", "cut"])
def test_a_row_that_stops_bootstraps_from_its_final_observation(name):
    columns = make_columns(**{name: flag((3, 5))})
    changed = edited(columns, "next_observation", (3, 5), 0.9)
    assert weights_after(columns) != weights_after(changed)


def test_a_row_that_terminates_does_not_bootstrap():
    columns = make_columns(terminated=flag((3, 5)))
    changed = edited(columns, "next_observation", (3, 5), 0.9)
    assert weights_after(columns) == weights_after(changed)


def test_truncated_and_cut_are_learned_from_alike():
    where = flag((3, 5), (6, 0))
    assert weights_after(make_columns(truncated=where)) == weights_after(make_columns(cut=where))


@pytest.mark.parametrize("source", [ActionSource.HUMAN, ActionSource.HOLD, ActionSource.ZERO])
def test_nothing_is_learned_from_actions_that_were_not_the_policys(source):
    columns = edited(make_columns(), "action_source", (4, 2), source)
    changed = edited(columns, "reward", (4, 2), 1000.0)
    changed = edited(changed, "log_prob", (4, 2), -50.0)
    changed = edited(changed, "observation", (4, 2), 0.5)
    assert weights_after(columns) == weights_after(changed)
    assert make_ppo().update(columns)["losses/masked_rows"] == 1.0


def test_a_clipped_action_is_learned_from_as_the_policy_chose_it():
    box = gym.spaces.Box(-1, 1, (1,), np.float32)
    chosen = np.random.default_rng(1).normal(size=(T, N, 1)).astype(np.float32)
    plain = make_columns(action=chosen)
    clipped = np.abs(chosen[..., 0]) > 1
    executed = {
        **make_columns(action=chosen.clip(-1, 1), policy_action=chosen),
        "action_source": np.where(clipped, ActionSource.CLIPPED, ActionSource.POLICY).astype("i1"),
    }
    assert clipped.any()
    assert weights_after(executed, action=box) == weights_after(plain, action=box)
    assert make_ppo(action=box).update(executed)["losses/masked_rows"] == 0.0


def test_nothing_is_learned_from_actions_that_had_no_answer_of_their_own():
    columns = make_columns(policy_version=np.ones((T, N), np.int64))
    columns = edited(columns, "policy_version", (4, 2), -1)
    changed = edited(columns, "log_prob", (4, 2), -50.0)
    assert weights_after(columns) == weights_after(changed)
    assert make_ppo().update(columns)["losses/masked_rows"] == 1.0


def test_a_rollout_of_other_actions_changes_nothing():
    ppo = make_ppo()
    before = ppo.weights()
    columns = make_columns(action_source=np.full((T, N), ActionSource.HUMAN, np.int8))
    metrics = ppo.update(columns)
    assert ppo.weights() == before
    assert metrics["losses/masked_rows"] == T * N
    assert "losses/policy" not in metrics


def test_equal_seeds_give_equal_weights():
    def train(seed):
        ppo = make_ppo(seed=seed)
        for rng in range(3):
            ppo.update(make_columns(rng))
        return ppo.weights()

    assert train(0) == train(0)
    assert train(0) != train(1)


def test_weights_come_back_as_they_were():
    ppo, other = make_ppo(), make_ppo(policy={"seed": 2})
    ppo.update(make_columns())
    observation = torch.rand(5, 3)
    assert not torch.equal(ppo.policy.actor(observation), other.policy.actor(observation))
    load_weights(other.policy, parse_weights(ppo.weights()))
    assert torch.equal(ppo.policy.actor(observation), other.policy.actor(observation))
    assert torch.equal(ppo.policy.critic(observation), other.policy.critic(observation))


def test_metrics_are_finite_scalars():
    ppo = make_ppo()
    ppo.update(make_columns(0))
    metrics = ppo.update(make_columns(1))
    assert set(metrics) == {
        f"losses/{name}"
        for name in (
            "policy", "value", "entropy", "approx_kl", "clip_fraction", "grad_norm",
            "explained_variance", "learning_rate", "masked_rows",
        )
    }  # fmt: skip
    assert all(isinstance(value, float) and np.isfinite(value) for value in metrics.values())
    assert ppo.rows == 2 * T * N


def test_the_learning_rate_falls_to_zero_over_the_budget():
    ppo = make_ppo(anneal_lr=True, train={"lr": 0.01, "max_env_steps": 2 * T * N})
    rates = [ppo.update(make_columns())["losses/learning_rate"] for _ in range(3)]
    assert rates == [0.005, 0.0, 0.0]


def test_the_scale_of_the_rewards_does_not_matter():
    small, large = make_ppo(), make_ppo()
    for rng in range(3):
        columns = make_columns(rng)
        small.update(columns)
        large.update({**columns, "reward": columns["reward"] * 1000.0})
    observation = torch.rand(50, 3)
    small_probs = small.policy.actor(observation).softmax(-1)
    large_probs = large.policy.actor(observation).softmax(-1)
    assert torch.allclose(small_probs, large_probs, atol=0.02)


def test_actions_of_a_space_may_start_anywhere():
    columns = make_columns()
    shifted = {**columns, "action": columns["action"] + 7}
    assert weights_after(columns) == weights_after(shifted, action=gym.spaces.Discrete(2, start=7))


def test_observations_may_be_nested():
    space = gym.spaces.Dict({"arm": VECTOR, "tool": gym.spaces.Discrete(4)})
    rng = np.random.default_rng(0)

    def observe():
        arm = rng.uniform(-1, 1, (T, N, 3)).astype(np.float32)
        return {"arm": arm, "tool": rng.integers(0, 4, (T, N))}

    ppo = make_ppo(observation=space)
    before = ppo.weights()
    ppo.update(make_columns(observation=observe(), next_observation=observe()))
    assert ppo.weights() != before


def test_observations_may_be_tuples():
    tool = gym.spaces.Tuple([gym.spaces.Discrete(4), gym.spaces.MultiBinary(2)])
    space = gym.spaces.Dict({"arms": gym.spaces.Tuple([VECTOR, VECTOR]), "tool": tool})
    rng = np.random.default_rng(0)

    def observe():
        arms = tuple(rng.uniform(-1, 1, (T, N, 3)).astype(np.float32) for _ in range(2))
        return {"arms": arms, "tool": (rng.integers(0, 4, (T, N)), np.ones((T, N, 2), np.int8))}

    ppo = make_ppo(observation=space)
    before = ppo.weights()
    ppo.update(make_columns(observation=observe(), next_observation=observe()))
    assert ppo.weights() != before


def test_columns_are_read_not_written():
    columns = make_columns()
    for column in columns.values():
        column.setflags(write=False)
    make_ppo().update(columns)


def test_learns_which_of_two_actions_pays():
    ppo = make_ppo()
    rng = np.random.default_rng(0)
    for _ in range(15):
        columns = make_columns(rng)
        with torch.no_grad():
            dist = ppo.policy.distribution(ppo.policy.actor(torch.tensor(columns["observation"])))
        probs = dist.probs.numpy()
        action = (rng.random((T, N)) < probs[..., 1]).astype(np.int64)
        # Action 1 pays where the first coordinate is positive, action 0 elsewhere.
        pays = (columns["observation"][..., 0] > 0) == (action == 1)
        columns |= {
            "action": action,
            "log_prob": np.log(np.take_along_axis(probs, action[..., None], -1)[..., 0]),
            "reward": pays.astype(np.float32),
            "terminated": np.ones((T, N), bool),
        }
        ppo.update(columns)
    assert pays.mean() > 0.85


def test_learns_a_continuous_action():
    ppo = make_ppo(action=gym.spaces.Box(-2, 2, (1,), np.float32), entropy_coeff=0.0)
    rng = np.random.default_rng(0)
    for _ in range(25):
        columns = make_columns(rng)
        with torch.no_grad():
            dist = ppo.policy.distribution(ppo.policy.actor(torch.tensor(columns["observation"])))
            mean, std = dist.mean.numpy(), dist.stddev.numpy()
            action = (mean + std * rng.standard_normal(mean.shape)).astype(np.float32)
            log_prob = dist.log_prob(torch.tensor(action)).numpy()
        columns |= {
            "action": action,
            "log_prob": log_prob,
            "reward": -((action[..., 0] - 1.0) ** 2),
            "terminated": np.ones((T, N), bool),
        }
        ppo.update(columns)
    assert abs(mean.mean() - 1.0) < 0.3


def test_what_both_networks_have_in_common_is_trained_by_both():
    space = gym.spaces.Box(0, 255, (1, 8, 8), np.uint8)
    model = {"convolutions": [[4, 4, 2]], "features": 8, "hidden": []}

    def make():
        return make_ppo(observation=space, policy={"model_cfg": model})

    def pictures(rng):
        rng = np.random.default_rng(rng)
        names = ("observation", "next_observation")
        return {name: rng.integers(0, 256, (T, N, 1, 8, 8), np.uint8) for name in names}

    ppo, resumed = make(), make()
    before = parse_weights(ppo.weights())
    ppo.update(make_columns(**pictures(0)))
    after = parse_weights(ppo.weights())
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert [name for name in moved if name.startswith("features.")] == [
        name for name in after if name.startswith("features.")
    ]
    resumed.restore(load_state(dump_state(ppo.state())))
    for one in (ppo, resumed):
        one.update(make_columns(1, **pictures(1)))
    assert resumed.weights() == ppo.weights()


def test_scales_of_observations_follow_what_was_learned_from_after_the_update():
    def make(normalize):
        return make_ppo(policy={"model_cfg": {"hidden": [16], "normalize": normalize}})

    ppo, plain = make(True), make(False)
    columns = make_columns()
    for one in (ppo, plain):
        one.update(columns)
    rows = columns["observation"].reshape(-1, 3)
    norm = ppo.policy.actor[0].norm
    assert norm is ppo.policy.critic[0].norm
    np.testing.assert_allclose(norm.mean, rows.mean(0), atol=1e-5)
    weights, without = (parse_weights(one.weights()) for one in (ppo, plain))
    assert torch.equal(weights["actor.0.norm.mean"], norm.mean)
    # The rollout itself was seen as the policy saw it when it acted.
    assert all(torch.equal(weights[name], without[name]) for name in without)


def test_a_rollout_without_log_prob_is_refused():
    columns = make_columns()
    del columns["log_prob"]
    with pytest.raises(PolicyError, match="needs a column 'log_prob'"):
        make_ppo().update(columns)


@pytest.mark.parametrize("name", ["reward", "observation"])
def test_nothing_is_learned_from_what_is_not_finite(name):
    ppo = make_ppo()
    before = ppo.weights()
    with pytest.raises(PolicyError, match="not finite"):
        ppo.update(edited(make_columns(), name, (0, 0), np.nan))
    assert ppo.weights() == before


def test_an_update_that_diverges_is_an_error():
    ppo = make_ppo()
    with pytest.raises(PolicyError, match="diverged"):
        ppo.update(edited(make_columns(), "log_prob", (0, 0), -np.inf))
    assert all(p.isfinite().all() for p in ppo.policy.actor.parameters())


class Actorless(ActorCriticPolicy):
    """Has no critic to train."""

    def construct_network(self, env_meta, **kwargs):
        super().construct_network(env_meta, **kwargs)
        self.value_head = self.critic

    def _construct(self, env_meta, **kwargs):
        super()._construct(env_meta, **kwargs)
        del self.critic


def test_a_policy_without_a_critic_is_refused():
    with pytest.raises(ConfigError, match="needs the modules 'actor' and 'critic'"):
        make_ppo(policy={"type": f"{__name__}:Actorless"})
