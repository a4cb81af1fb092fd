"""Which run a new one goes on from."""

import pytest
from typer.testing import CliRunner

from rlightning.cli.app import app
from rlightning.cluster import train
from rlightning.cluster.past_runs import find_resumable, find_run, read_checkpoint
from rlightning.cluster.runs import Run
from rlightning.errors import ConfigError
from rlightning.learner.checkpoints import Checkpoints
from rlightning.learner.loop import LearnerStats
from rlightning.utils.config import MainConfig


@pytest.fixture
def config(tmp_path):
    env = {"name": "cart", "backend": "gymnasium", "task": "CartPole-v1"}
    return MainConfig.from_dict({"env": env, "log": {"log_dir": str(tmp_path / "runs")}})


def make_run(config, *, saved):
    run = Run.create(config, command=[])
    run.begin()
    if saved:
        Checkpoints(run.checkpoints).save(LearnerStats(policy_version=3), b"weights", b"state")
    return run.path.resolve()


def test_the_newest_run_with_a_checkpoint_is_gone_on_from(config):
    assert find_resumable(config) is None
    make_run(config, saved=False)
    assert find_resumable(config) is None
    saved = [make_run(config, saved=True) for _ in range(9)]
    assert saved[-1].name == "10"  # which is not the last one in the order of letters
    make_run(config, saved=False)  # killed before its first checkpoint
    assert find_resumable(config) == saved[-1]


@pytest.mark.parametrize("link", ["latest", "best"])
def test_a_run_without_a_checkpoint_names_one_that_has_it(config, link):
    bare = make_run(config, saved=False)
    with pytest.raises(ConfigError, match="1 kept no checkpoint$"):
        read_checkpoint(bare, link, config)
    saved = make_run(config, saved=True)
    bare = make_run(config, saved=False)
    with pytest.raises(ConfigError, match=f"3 kept no checkpoint; .* is {saved}$"):
        read_checkpoint(bare, link, config)


def test_a_folder_that_is_no_number_is_none_of_the_runs(config):
    saved = make_run(config, saved=True)
    other = saved.with_name("²")  # a digit, of which `int` makes nothing
    other.mkdir()
    (other / "config.yaml").write_text((saved / "config.yaml").read_text())
    assert find_resumable(config) == saved
    assert make_run(config, saved=True).name == "2"


@pytest.mark.parametrize(
    ("options", "number", "note"),
    [
        (["--or-anew", "--resume", "latest"], "1", ""),
        (["--or-anew", "--resume="], None, "starts anew"),
        (["--or-anew"], None, "starts anew"),
        (["--or-anew", "--resume=latest", "--name=x"], None, "no run in RUNS/x has a checkpoint"),
        ([], None, ""),
    ],
)
def test_or_anew_starts_where_there_is_nothing_and_says_so(
    config, tmp_path, monkeypatch, options, number, note
):
    make_run(config, saved=True)
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    asked = {}
    monkeypatch.setattr(train, "train", lambda config, **given: asked.update(given) or True)
    done = CliRunner().invoke(app, ["train", str(file), *options])
    assert done.exit_code == 0, done.output
    assert (asked["resume"] and asked["resume"].name) == number
    assert note.replace("RUNS", str(tmp_path / "runs")) in asked["note"]
    assert bool(note) == bool(asked["note"])


@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize("options", [[], ["--end-is-ok"]])
def test_the_end_of_a_run_is_no_failure_where_any_end_will_do(
    config, tmp_path, monkeypatch, options, reached
):
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    monkeypatch.setattr(train, "train", lambda config, **given: reached)
    done = CliRunner().invoke(app, ["train", str(file), *options])
    assert done.exit_code == (0 if reached or options else 1), done.output


def test_a_run_that_is_named_has_to_be_there(config, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    done = CliRunner().invoke(app, ["train", str(file), "--resume", "runs/9", "--or-anew"])
    assert done.exit_code == 2
    done = CliRunner().invoke(app, ["train", "--or-anew"])
    assert done.exit_code == 2


def test_the_last_of_all_runs_is_found_beside_one_whose_files_are_gone(
    config, tmp_path, monkeypatch
):
    run = make_run(config, saved=False)
    gone = tmp_path / "runs" / "gone" / "1"
    gone.mkdir(parents=True)
    (gone.parent / "latest").symlink_to("1")
    monkeypatch.chdir(tmp_path)
    assert find_run("latest") == run
