"""The capacity model of docs/scaling.md: it finds what is true of simulated runs, and who is full first."""

from dataclasses import astuple, replace

import gymnasium as gym
import numpy as np
import pytest

from benchmarks.capacity import (
    ROLES,
    Host,
    Limits,
    Measured,
    Memory,
    Work,
    cores_of,
    fit,
    most_hosts,
    needs,
    rate_at,
)
from benchmarks.capacity_networks import (
    MIB,
    Gpu,
    LearnerMemory,
    Network,
    TrainingSize,
    acting,
    acting_mib,
    layers,
    learning,
    learning_mib,
)
from rlightning.policy import build_policy
from rlightning.types import EnvMeta
from rlightning.utils.config import Config, PolicyConfig

TRUE = {
    "env": {"steps": 150e-6, "rows": 1e-6, "bytes": 1e-9, "threaded": 80e-6},
    "policy": {"steps": 90e-6, "rows": 0.5e-6, "bytes": 2e-9},
    "buffer": dict.fromkeys(ROLES["buffer"], 0.0) | {"steps": 60e-6, "batch_bytes": 1e-9},
    "learner": {"batches": 300e-6, "batch_rows": 1e-6, "batch_bytes": 1e-9},
}


def runs(noise=0.0):
    rng = np.random.default_rng(0)
    for nbytes, rows in [(16, 1), (16, 64), (16, 512), (3072, 16), (28224, 1), (28224, 32)]:
        for threaded, batch in [(0, 64), (100, 512)]:
            steps, batches = rng.uniform(100, 1000), rng.uniform(5, 50)
            work = Work(
                *(steps, steps * rows, steps * rows * nbytes, threaded),
                *(batches, batches * batch, 2 * batches * batch * nbytes),
            )
            cores = {
                role: used * rng.uniform(1 - noise, 1 + noise)
                for role, used in cores_of(work, TRUE).items()
            }
            yield Measured("", work, cores)


def test_the_costs_of_runs_are_found_and_those_that_there_are_not_are_zero():
    found = fit(list(runs()))
    for role, kinds in TRUE.items():
        assert found[role] == pytest.approx(kinds, rel=1e-6, abs=1e-12)


def test_noise_moves_what_is_predicted_no_further_than_itself():
    found = fit(list(runs(noise=0.1)))
    for run in runs():
        for role, used in cores_of(run.work, found).items():
            assert used == pytest.approx(run.cores[role], rel=0.25)
    assert min(cost for kinds in found.values() for cost in kinds.values()) >= 0


def test_who_is_full_first_and_how_many_there_must_be():
    host = Host("", groups=2, rows=16, hz=50, nbytes=100, samples_per_insert=1)
    one = cores_of(host.work(1), TRUE)
    limits = Limits(cores=0.5, sessions=1000)
    assert most_hosts(host, "policy", TRUE, limits, {}) == pytest.approx(0.5 / one["policy"])
    first, *others = needs(host, 100, TRUE, limits, {})
    assert (first.role, first.because) == ("policy", "CPU")
    assert first.processes == np.ceil(100 * one["policy"] / 0.5)
    assert {need.role for need in others} == {"buffer", "learner"}
    idle = Host("", groups=20, rows=1, hz=0.01, nbytes=4)
    (first, *_) = needs(idle, 100, TRUE, limits, {})
    assert (first.because, first.processes) == ("sessions", 2)
    wide = Host("", groups=1, rows=1, hz=1, nbytes=10**9, kept=0)
    assert needs(wide, 10, TRUE, limits, {})[0].because == "CPU"
    assert needs(wide, 10, TRUE, Limits(cores=100), {})[0].because == "network"


def test_what_is_kept_and_what_sessions_take_fill_the_memory():
    memory = {"policy": Memory(base=300, group=10), "buffer": Memory(base=100, group=2)}
    host = Host("", groups=5, rows=1, hz=0.01, nbytes=4, kept=200)
    limits = Limits(memory=1000)
    buffer, policy, learner = needs(host, 10, TRUE, limits, memory)
    # 10 hosts keep 2,000 rows of 4 B, and have 50 groups; 900 B of each process are left for them.
    assert (buffer.role, buffer.because, buffer.processes) == ("buffer", "memory", 9)
    assert buffer.memory == 8000 + 50 * 2 + 9 * 100
    assert (policy.role, policy.because, policy.processes) == ("policy", "memory", 1)
    assert policy.memory == 50 * 10 + 300
    assert (learner.role, learner.memory) == ("learner", 0)  # of it nothing was told
    assert most_hosts(host, "buffer", TRUE, limits, memory) == pytest.approx(900 / 810)


def test_a_machine_that_all_share_does_as_much_as_its_cores_allow():
    shape = Work(steps=1, rows=64, bytes=64 * 16)
    rate = rate_at(2.0, shape, TRUE)
    assert sum(cores_of(shape * rate, TRUE).values()) == pytest.approx(2.0)


def test_a_network_is_counted_as_torch_builds_it():
    convolutions = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]
    model = {"convolutions": convolutions, "features": 512, "hidden": [64], "activation": "relu"}
    pictures = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    policy = build_policy(PolicyConfig(device="cpu", model_cfg=Config(**model)), "eval")
    policy.init_eval(env_meta=EnvMeta("env", gym.spaces.Discrete(6), pictures, 1))
    features = layers(pictures.shape, convolutions=convolutions, outputs=512)
    both = (layers((512,), hidden=(64,), outputs=outputs) for outputs in (6, 1))
    counted = sum(both, features)
    built = [
        n for one in ("features", "actor", "critic") for n in getattr(policy, one).parameters()
    ]
    assert counted.parameters == sum(one.numel() for one in built)


def test_a_network_of_one_layer_by_hand():
    network = layers((3,), outputs=2)
    assert network == Network(parameters=8, macs=6, outputs=2)
    picture = layers((1, 5, 5), convolutions=[(2, 3, 2)], outputs=1)
    # Two kernels of nine at four places; then eight numbers and a constant.
    assert picture == Network(parameters=2 * 10 + 9, macs=4 * 18 + 8, outputs=8 + 1)
    gpu = Gpu("", flops=1e3, reached=0.5)
    assert acting(network, 10, gpu) == pytest.approx(2 * 6 * 10 / 500)
    assert learning(network, 10, gpu) == pytest.approx(3 * acting(network, 10, gpu))
    assert acting_mib(network, 4, 3) * MIB == pytest.approx(2 * 4 * 8 + 4 * (15 + 8))
    assert learning_mib(network, 4, 3) * MIB == pytest.approx(16 * 8 + 4 * (15 + 16))


def test_the_memory_of_a_learner_is_found():
    true = LearnerMemory(base_mib=380.0, weights=7.0, batch=5.0, outputs=3.0)
    small = TrainingSize(weights=1e4, batch=1e3, outputs=1e3)
    large = (replace(small, **{name: 64e6}) for name in ("weights", "batch", "outputs"))
    sizes = [small, *large]
    found = LearnerMemory.fit(sizes, [true.mib(size) for size in sizes])
    assert astuple(found) == pytest.approx(astuple(true))
    assert found.mib(TrainingSize(MIB, 2 * MIB, 3 * MIB)) == pytest.approx(406.0)
