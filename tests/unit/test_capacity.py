"""The capacity model of docs/scaling.md: it finds what is true of simulated runs, and who is full first."""

import numpy as np
import pytest

from benchmarks.capacity import (
    ROLES,
    Host,
    Limits,
    Measured,
    Work,
    cores_of,
    fit,
    most_hosts,
    needs,
    rate_at,
)

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
    assert most_hosts(host, "policy", TRUE, limits) == pytest.approx(0.5 / one["policy"])
    first, *others = needs(host, 100, TRUE, limits)
    assert (first.role, first.because) == ("policy", "CPU")
    assert first.processes == np.ceil(100 * one["policy"] / 0.5)
    assert {need.role for need in others} == {"buffer", "learner"}
    idle = Host("", groups=20, rows=1, hz=0.01, nbytes=4)
    (first, *_) = needs(idle, 100, TRUE, limits)
    assert (first.because, first.processes) == ("sessions", 2)
    wide = Host("", groups=1, rows=1, hz=1, nbytes=10**9)
    assert needs(wide, 10, TRUE, limits)[0].because == "CPU"
    assert needs(wide, 10, TRUE, Limits(cores=100))[0].because == "network"


def test_a_machine_that_all_share_does_as_much_as_its_cores_allow():
    shape = Work(steps=1, rows=64, bytes=64 * 16)
    rate = rate_at(2.0, shape, TRUE)
    assert sum(cores_of(shape * rate, TRUE).values()) == pytest.approx(2.0)
