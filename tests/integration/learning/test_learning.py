"""Every algorithm learns, through the actor loop, the batcher and the buffer of this process."""

import json

import imageio_ffmpeg
import pytest

from rlightning.cluster.evaluate import evaluate, show_evaluation
from rlightning.cluster.in_process import InProcessBackend
from rlightning.cluster.past_runs import find_run
from rlightning.cluster.train import train
from rlightning.errors import ConfigError
from rlightning.learner import Checkpoint
from rlightning.policy.weights import parse_weights
from rlightning.utils.config import load_config
from tests.e2e.command import ROOT
from tests.integration.learning.configs import ALGORITHMS, make_config

OWN = "tests.integration.learning.own"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_learns_and_its_best_weights_succeed(algorithm, tmp_path):
    assert train(make_config(algorithm, tmp_path), in_process=True, quiet=True)
    run = tmp_path / "reach" / "1"
    end = json.loads((run / "manifest.json").read_text())["summary"]
    # The mean of the last episodes, exploration included, at the end: it reached -1.2 a moment
    # before. At random it is about -4.
    assert end["mean_return"] >= -2.0
    assert (run / "checkpoints" / "latest" / "learner.safetensors").exists()
    evaluation = evaluate(run, episodes=20, seed=3)
    summary = evaluation.summary()
    assert len(evaluation.episodes) == 20
    # Of 20 episodes without exploration, in which some weights only go one way: -3.0 and 12 of 20.
    # Who never moves has -4.0 and 5 of 20, who always moves one way -9.4 and none.
    assert summary["mean_return"] >= -3.5
    assert summary["success_rate"] >= 0.5  # the env says so itself
    assert evaluate(run, episodes=20, seed=3) == evaluation
    assert evaluate(run, episodes=20, seed=4) != evaluation


def test_an_evaluation_is_a_table_a_line_of_json_and_a_film(tmp_path, capsys):
    config = make_config("ppo", tmp_path, target_return=None, max_env_steps=200)
    assert train(config, in_process=True, quiet=True)
    evaluation = evaluate(find_run("latest", config), episodes=3, video=True)
    show_evaluation(evaluation, as_json=False)
    low, high = evaluation.summary()["success_interval"]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"(95 % interval {100 * low:.1f} to {100 * high:.1f} %)" in shown
    assert f"wrote {evaluation.video}" in shown
    show_evaluation(evaluation, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["summary"]["success_interval"] == [low, high]
    assert [one["length"] for one in told["episodes"]] == [8] * 3
    # A picture for each step, at the rate that the env names; its sizes are odd, of a film even.
    assert imageio_ffmpeg.count_frames_and_secs(told["video"]) == (24, pytest.approx(2.4))


@pytest.mark.parametrize("algorithm", ["policy", "ppo"])
def test_the_custom_policy_learns_with_its_own_loss_and_with_ppo(algorithm, tmp_path, monkeypatch):
    example = ROOT / "examples" / "custom_policy"
    monkeypatch.syspath_prepend(str(example))
    overrides = [f"learner.algorithm={algorithm}", f"log.log_dir={tmp_path}", "log.backend=none"]
    config = load_config(example / "config.yaml", [*overrides, "train.target_return=60"])
    assert train(config, in_process=True, quiet=True)


@pytest.mark.parametrize(
    ("algorithm", "policy", "name"),
    [
        ("ppo", "OwnActorCritic", "ppo"),
        ("vtrace", "OwnActorCritic", "vtrace"),
        ("dqn", "OwnQ", "dqn"),
        ("dqn", "OwnQ", f"{OWN}:cautious_dqn"),
        ("sac", "OwnSAC", "sac"),
    ],
)
def test_every_algorithm_trains_networks_of_the_user(algorithm, policy, name, tmp_path):
    config = make_config(algorithm, tmp_path, target_return=None, max_env_steps=400)
    config.policy.type = f"{OWN}:{policy}"
    config.learner.algorithm = name
    assert train(config, in_process=True, quiet=True)
    run = find_run("latest", config)
    end = json.loads((run / "manifest.json").read_text())["summary"]
    assert end["updates"] > 0
    saved = Checkpoint.read(run / "checkpoints" / "latest")
    names = {one.rpartition(".")[0].partition(".")[2] for one in parse_weights(saved.weights)}
    assert names >= {"first", "block", "last"}
    assert len(evaluate(run, episodes=4).episodes) == 4


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_a_run_goes_on_from_the_checkpoint_of_another(algorithm, tmp_path, monkeypatch):
    holds, hold = [], InProcessBackend.hold
    monkeypatch.setattr(
        InProcessBackend, "hold", lambda self, wanted: holds.append(wanted) or hold(self, wanted)
    )
    short = {"target_return": None, "max_env_steps": 1200}
    first = make_config(algorithm, tmp_path, **short)
    assert train(first, in_process=True, quiet=True)
    # Who learns for each step lets the actors wait until it can; others take what there is.
    assert holds[:2] == ([True, False] if algorithm == "sac" else [])
    run = find_run("latest", first)
    before = json.loads((run / "checkpoints" / "latest" / "manifest.json").read_text())
    longer = make_config(algorithm, tmp_path, **{**short, "max_env_steps": 1600})
    assert train(longer, in_process=True, quiet=True, resume=run)
    again = find_run("latest", first)
    assert (run.name, again.name) == ("1", "2")
    after = json.loads((again / "checkpoints" / "latest" / "manifest.json").read_text())
    assert after["policy_version"] > before["policy_version"]
    assert after["updates"] > before["updates"]
    assert after["env_steps"] >= 1600
    manifest = json.loads((again / "manifest.json").read_text())
    assert manifest["resumed"] == str((run / "checkpoints" / "latest").resolve())
    # Steps count on: it learned from those that were left only, however far ahead the envs ran.
    assert manifest["summary"]["env_steps"] >= 1600
    if algorithm == "sac":
        assert after["updates"] == (1600 - 128) * 0.25
    else:
        assert after["rows"] < before["rows"] + 1200
    other = make_config("vtrace" if algorithm == "ppo" else "dqn", tmp_path)
    with pytest.raises(ConfigError, match=r"learner\.algorithm was"):
        train(other, in_process=True, quiet=True, resume=run)
