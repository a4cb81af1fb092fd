"""`rlightning train`: learns, records what it did, and never collides with another run."""

import csv
import json
import re
import signal
from contextlib import ExitStack

import pytest

from rlightning.testing import wait_until
from tests.e2e.command import CARTPOLE, SMALL, Command, TerminalCommand, is_running, run, settings

pytestmark = pytest.mark.slow
UNTIL_USED_UP = (*SMALL, "train.max_env_steps=2000")
NO_WEIGHTS = ("policy.initial_weights=none",)


def last_line(text):
    return json.loads(text.splitlines()[-1])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("launcher", ["local", "in-process"])
def test_cartpole_is_solved(tmp_path, launcher):
    code, out, err = run(
        "train", CARTPOLE, "--launcher", launcher, "--json", cwd=tmp_path, timeout_s=150
    )
    assert code == 0, err
    assert len(out.splitlines()) == 1
    end = last_line(out)
    assert end["outcome"] == "solved"
    assert end["reached_return"] >= 475
    assert 0 < end["elapsed_s"] < 120  # from SERVING on; minutes would be no demo any more
    assert end["max_staleness"] <= 2  # of all rows of all updates
    assert end["run"] == "runs/cartpole/1"
    assert "env.round_trip" in err
    folder = tmp_path / end["run"]
    episodes = list(csv.DictReader((folder / "episodes.csv").read_text().splitlines()))
    assert len(episodes) == end["episodes"]
    assert sum(float(row["return"]) for row in episodes[-100:]) / 100 == end["mean_return"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["outcome"] == "solved"
    assert manifest["command"][0] == "rlightning"
    assert list((folder / "tensorboard").iterdir())
    assert (folder / "checkpoints" / "latest" / "weights.safetensors").exists()


def test_the_steps_used_up_and_the_saved_config_trained_again(tmp_path):
    options = ("--launcher", "in-process", "--json")
    begin = settings(*UNTIL_USED_UP, "policy.initial_weights=random", "log.name=short")
    code, out, err = run("train", CARTPOLE, *begin, *options, cwd=tmp_path)
    assert code == 0, err
    check_used_up(last_line(out))
    assert last_line(out)["run"] == "runs/short/1"
    again = ("runs/short/latest/config.yaml", *settings("train.max_env_steps=128"))
    code, out, err = run("train", *again, *options, cwd=tmp_path)
    assert code == 0, err
    assert last_line(out)["run"] == "runs/short/2"


def test_nobody_acts_with_random_weights_unless_told_so(tmp_path):
    options = settings(*SMALL, *NO_WEIGHTS, "train.max_env_steps=128")
    options += ("--launcher", "in-process", "--json")
    code, _, err = run("train", CARTPOLE, *options, cwd=tmp_path)
    assert code == 0, err
    check_learned_weights(tmp_path / "runs" / "cartpole" / "1")


@pytest.mark.timeout(180)
def test_four_at_once_do_not_collide(tmp_path):
    wanted = [(), (), ("train.target_return=1e9",), (*UNTIL_USED_UP, *NO_WEIGHTS)]
    with ExitStack() as stack:
        commands = [
            stack.enter_context(
                Command(
                    *("train", CARTPOLE, *settings(*SMALL, *each), "--json", "--quiet"),
                    cwd=tmp_path,
                )
            )
            for each in wanted
        ]
        codes = [command.wait(150) for command in commands]
        assert codes == [0, 0, 1, 0], [command.stderr for command in commands]
        assert [command.stderr for command in commands] == [""] * 4
        ends = [last_line(command.stdout) for command in commands]
    assert {end["run"] for end in ends} == {f"runs/cartpole/{n}" for n in range(1, 5)}
    assert [end["outcome"] for end in ends] == ["finished"] * 2 + ["target_missed", "finished"]
    check_used_up(ends[3])
    assert ends[3]["rows_skipped"] == 0
    check_learned_weights(tmp_path / ends[3]["run"])


def check_used_up(end):
    """The steps are those that were executed; the last of them are not learned from."""
    assert end["outcome"] == "finished"
    assert end["env_steps"] >= 2000
    assert end["rows_learned"] == 32 * end["updates"] <= end["env_steps"] - end["rows_skipped"]
    assert end["updates"] > 40
    # Rollouts of 8 steps, which is less than a writer would send ahead by itself.
    assert end["max_staleness"] <= 2


def check_learned_weights(folder):
    episodes = (folder / "episodes.csv").read_text().splitlines()
    versions = {int(row["version"]) for row in csv.DictReader(episodes)}
    assert versions
    assert min(versions) >= 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_run_that_is_stopped_ends_in_order_and_has_saved(tmp_path, number, code):
    options = settings("train.target_return=null")
    # Ctrl-C comes from a terminal, SIGTERM from another program.
    kind = TerminalCommand if number == signal.SIGINT else Command
    with kind("train", CARTPOLE, *options, "--stop-is-ok", cwd=tmp_path) as command:
        if kind is TerminalCommand:
            watch_panel(command)
        else:
            command.wait_for(r"version [1-9]")
        pids = command.services().values()
        assert len(pids) == 3
        command.process.send_signal(number)
        assert command.wait() == code
        assert command.stderr == "interrupted\n"
        if kind is TerminalCommand:  # which has its cursor again
            assert command.written.rfind("\x1b[?25h") > command.written.rfind("\x1b[?25l") >= 0
        assert not any(map(is_running, pids))
    manifest = json.loads((tmp_path / "runs" / "cartpole" / "1" / "manifest.json").read_text())
    assert manifest["outcome"] == "interrupted"
    saved = tmp_path / "runs" / "cartpole" / "1" / "checkpoints" / "latest" / "manifest.json"
    assert json.loads(saved.read_text())["policy_version"] >= 1


def watch_panel(command):
    """Waits until the panel of a run on a terminal was kept up to date."""
    panel = re.compile(
        r"^env steps ([\d,]+) +[\d,]+ steps/s +episodes [\d,]+ +return .*\n"
        r"policy version [1-9]\d* +staleness [\d.]+ \(p50 / p90 / p99 [\d. /]+\) +updates .*\n"
        r"latency +p50 +p90 +p99 +max .*\n"
        r"env\.\w+ +\d",
        re.MULTILINE,
    )
    wait_until(lambda: len(set(panel.findall(command.stdout))) >= 3, 60)


def test_a_killed_run_leaves_no_orphans(tmp_path):
    options = settings("train.target_return=null")
    with Command("train", CARTPOLE, *options, cwd=tmp_path) as command:
        command.wait_for(r"version [1-9]")
        pids = list(command.services().values())
        assert len(pids) == 3
        command.process.kill()
    wait_until(lambda: not any(map(is_running, pids)), 15, "services outlive their parent")
