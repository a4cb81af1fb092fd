"""Folders of runs."""

import csv
import errno
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from rlightning.cluster.past_runs import outcome_of
from rlightning.cluster.runs import Run, run_name
from rlightning.env.episodes import EpisodeRecord
from rlightning.errors import ConfigError
from rlightning.utils.config import MainConfig, load_config


def make_config(tmp_path, **log):
    env = {"name": "cart/pole", "backend": "gymnasium", "task": "CartPole-v1"}
    return MainConfig.from_dict({"env": env, "log": {"log_dir": str(tmp_path / "runs"), **log}})


def test_a_run_has_its_files(tmp_path):
    config = make_config(tmp_path, name="demo")
    run = Run.create(config, command=["rlightning", "train", "x.yaml"])
    assert run.path == tmp_path / "runs" / "demo" / "1"
    assert load_config([run.config_file], environ={}) == config
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["command"] == ["rlightning", "train", "x.yaml"]
    assert manifest["outcome"] == "starting"
    assert manifest["versions"]["numpy"]
    assert run.logs.is_dir()
    assert run.checkpoints.is_dir()
    assert run.tensorboard.is_dir()


def test_latest_is_the_last_run_that_began(tmp_path):
    first, second = (Run.create(make_config(tmp_path), command=[]) for _ in range(2))
    latest = first.path.parent / "latest"
    assert not latest.exists()
    first.begin()
    assert latest.resolve() == first.path.resolve()
    assert [outcome_of(run.path) for run in (first, second)] == ["running", "starting"]
    second.begin()
    assert latest.resolve() == second.path.resolve()


def test_a_failed_start_leaves_a_folder_only_with_logs(tmp_path):
    silent, spoken = (Run.create(make_config(tmp_path), command=[]) for _ in range(2))
    for run, text in ((silent, ""), (spoken, "env_server did not start: no luck\n")):
        (run.logs / "env_server.log").write_text(text)
        run.finish("failed")
    assert not silent.path.exists()
    assert json.loads((spoken.path / "manifest.json").read_text())["outcome"] == "failed"
    assert not (spoken.path.parent / "latest").exists()


def test_finish_records_the_outcome(tmp_path):
    run = Run.create(make_config(tmp_path), command=[])
    run.begin()
    run.finish("solved", {"env_steps": 10})
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["outcome"] == "solved"
    assert manifest["summary"] == {"env_steps": 10}
    assert manifest["end"] >= manifest["start"]


def test_episodes_are_rows(tmp_path):
    run = Run.create(make_config(tmp_path), command=[])
    episode = EpisodeRecord(
        episode_return=9.5,
        length=9,
        env_id="e-0",
        row=3,
        episode_id=4,
        seed=None,
        policy_version=2,
        reason="terminated",
        ts_end_ns=1_000_000_000,
    )
    run.append_episodes([episode])
    run.append_episodes([episode])
    rows = list(csv.DictReader(run.episodes.read_text().splitlines()))
    assert len(rows) == 2
    assert rows[0] == {
        "return": "9.5",
        "length": "9",
        "env": "e-0",
        "row": "3",
        "seed": "",
        "version": "2",
        "reason": "terminated",
        "ts": "1970-01-01T00:00:01.000+00:00",
    }


def test_runs_at_the_same_time_never_share_a_folder(tmp_path):
    config, barrier = make_config(tmp_path, name="same"), Barrier(8)

    def create(_):
        barrier.wait()
        run = Run.create(config, command=[])
        run.begin()
        return run.path.name

    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(create, range(8)))
    assert sorted(map(int, names)) == list(range(1, 9))
    assert (tmp_path / "runs" / "same" / "latest").is_dir()


def test_the_name_falls_back_to_the_env(tmp_path):
    assert run_name(make_config(tmp_path)) == "cart_pole"
    assert run_name(MainConfig()) == "run"


def test_numbers_go_on(tmp_path):
    for existing in ("7", "notes"):
        (tmp_path / "runs" / "n" / existing).mkdir(parents=True)
    assert Run.create(make_config(tmp_path, name="n"), command=[]).path.name == "8"


def test_a_folder_that_cannot_be_is_told_with_its_key(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match=r"log\.log_dir '.*': cannot make .*: Not a directory"):
        Run.create(make_config(tmp_path), command=[])


def test_a_full_disk_is_not_littered(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Run.create(make_config(tmp_path), command=[])
    before = sorted(run.path.iterdir())
    monkeypatch.setattr(Path, "chmod", full)
    run.save_progress({"updates": 1})
    assert sorted(run.path.iterdir()) == before
