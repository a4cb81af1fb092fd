"""A learner that is killed in the middle: another run goes on from what it had saved."""

import csv
import json

import pytest

from rlightning.testing import wait_until
from tests.e2e.command import CARTPOLE, SMALL, Command, is_running, run, settings

pytestmark = [pytest.mark.crash, pytest.mark.timeout(300)]


def test_a_run_goes_on_from_the_checkpoint_of_a_killed_one_and_is_evaluated(tmp_path):
    options = settings(*SMALL, "train.max_env_steps=1000000", "train.save_interval=5")
    with Command("train", CARTPOLE, *options, cwd=tmp_path) as command:
        latest = tmp_path / "runs" / "cartpole" / "1" / "checkpoints" / "latest"
        wait_until((latest / "manifest.json").exists, 120, "no checkpoint was written")
        pids = list(command.services().values())
        command.process.kill()
        command.process.wait()
    wait_until(lambda: not any(map(is_running, pids)), 30, "services outlive their parent")
    saved = json.loads((latest / "manifest.json").read_text())
    steps = saved["env_steps"] + 300
    code, out, err = run(
        *("train", "--resume", "latest", "--json", "--set", f"train.max_env_steps={steps}"),
        cwd=tmp_path,
        timeout_s=120,
    )
    assert code == 0, err
    assert f"resumes {latest.resolve()}" in err
    end = json.loads(out.splitlines()[-1])
    assert end["run"] == "runs/cartpole/2"
    assert end["updates"] > saved["updates"]
    assert end["env_steps"] >= steps
    assert end["policy_version"] > saved["policy_version"]
    episodes = (tmp_path / "runs" / "cartpole" / "2" / "episodes.csv").read_text().splitlines()
    versions = [int(row["version"]) for row in csv.DictReader(episodes)]
    # Rows of the first moments may have been acted in by random weights, which have version 0.
    assert all(version == 0 or version > saved["policy_version"] for version in versions)
    code, out, err = run("eval", "latest", "--episodes", "3", "--json", cwd=tmp_path)
    assert code == 0, err
    evaluation = json.loads(out)
    assert len(evaluation["episodes"]) == 3
    assert evaluation["policy_version"] > saved["policy_version"]


def test_what_is_no_run_cannot_be_resumed_nor_evaluated(tmp_path):
    for command in (("train", "--resume"), ("eval",)):
        for name, said in (
            ("latest", "there is no run in 'runs'"),
            ("x", "x is no folder of a run"),
        ):
            code, _, err = run(*command, name, cwd=tmp_path)
            assert code == 2
            assert said in err
