"""Training over two buffer servers, of which one is killed."""

import json
import os
import re
import shlex
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from rlightning.testing import wait_until
from tests.e2e.command import CARTPOLE, SMALL, Command, run, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DQN = CARTPOLE.with_name("cartpole_dqn.yaml")
SHARDED = ("buffer.storage.type=sharded", "buffer.storage.num_shards=2")


def buffer_servers(command):
    """Process ids of the buffer servers, in the order of their shards."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            words = (folder / "cmdline").read_bytes().decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        shard = re.search(r"buffer-(\d)\.yaml", words)
        if int(parent) == command.process.pid and shard:
            found[int(shard[1])] = int(folder.name)
    return [found[shard] for shard in sorted(found)]


def test_a_run_has_as_many_buffer_servers_as_shards(tmp_path):
    options = settings(*SMALL, *SHARDED, "train.max_env_steps=512")
    code, out, err = run("train", CARTPOLE, *options, "--json", cwd=tmp_path)
    assert code == 0, err
    end = json.loads(out.splitlines()[-1])
    assert end["outcome"] == "finished"
    # Two groups of two rows, each with a server of its own: every batch has the rows of both.
    assert end["rows_learned"] == 32 * end["updates"]
    assert end["max_staleness"] <= 2
    logs = sorted(file.name for file in (tmp_path / end["run"] / "logs").glob("buffer*.log"))
    assert logs == ["buffer_server-0.log", "buffer_server-1.log"]
    config = yaml.safe_load((tmp_path / end["run"] / "config.yaml").read_text())
    assert len(set(config["buffer"]["storage"]["addresses"])) == 2


@pytest.mark.crash
def test_each_shard_has_a_folder_of_its_own(tmp_path):
    options = settings(
        *(*SHARDED, "train.target_return=null", "train.max_env_steps=256"),
        *("buffer.data_dir=data", "buffer.durability=process", "buffer.restore=latest"),
    )
    code, _, err = run("train", DQN, *options, "--json", cwd=tmp_path)
    assert code == 0, err
    for shard in ("buffer-0", "buffer-1"):
        assert list((tmp_path / "data" / shard / "journal").glob("*.journal"))


@pytest.mark.crash
def test_a_shard_is_killed_left_out_and_comes_back(tmp_path):
    options = settings(
        *(one for one in SMALL if "max_env_steps" not in one),
        *SHARDED,
        "buffer.storage.missing_shards=skip",
        "buffer.storage.missing_after_s=0.5",
        "train.max_env_steps=1_000_000",
    )
    with ExitStack() as stack:
        command = stack.enter_context(
            Command("train", CARTPOLE, *options, "--restart-window", "60", cwd=tmp_path)
        )

        def newest():
            return max(map(int, re.findall(r"version (\d+)", command.stdout)), default=0)

        wait_until(lambda: newest() > 2, 60)
        os.kill(buffer_servers(command)[1], signal.SIGKILL)
        again = command.wait_for(r"^  (\S.*buffer_server .*buffer-1\.yaml.*)$", 30)[1]
        before = newest()
        wait_until(
            lambda: newest() > before + 1, 30
        )  # the rows of the other shard are learned from
        stack.enter_context(Command(*shlex.split(again), cwd=tmp_path, command=()))
        command.wait_for(r"the buffer server 1 is SERVING again", 30)
        before = newest()
        wait_until(lambda: newest() > before + 2, 30)
        command.interrupt()
        command.wait(30)


def test_sharded_storage_without_a_number_is_refused_in_one_line(tmp_path):
    options = settings(*SMALL, "buffer.storage.type=sharded")
    code, _, err = run("train", CARTPOLE, *options, cwd=tmp_path)
    assert code == 2
    assert "buffer.storage.type: 'sharded' needs storage.num_shards" in err
    assert len(err.splitlines()) == 1
