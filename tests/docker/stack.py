"""The stack of docker-compose.yml on a Docker engine: this machine's, or one that is started for the tests."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENGINE = HERE / "engine.sh"
RLIGHTNING = Path(sys.executable).parent / "rlightning"
BASE_IMAGE = "python:3.11-slim"
PROJECT = "rlightning-test"
SERVICES = ("env_server", "policy_server", "buffer_server")


def run(*command, timeout_s=60.0, check=True):
    """Runs a command in the folder of docker-compose.yml; returns its stdout."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def wait_until(condition, timeout_s, message):
    """Waits until a condition holds; looks once a second, since a look costs processes."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {message}"
        time.sleep(1)


@contextmanager
def engine(monkeypatch):
    """A Docker engine with Compose: the machine's own if it has one, else one of ours."""
    if shutil.which("docker") and run("docker", "compose", "ls", check=False):
        yield
        return
    with Path("/var/tmp/rlightning-engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one run at a time on this machine
        variables = _in_bash(f"engine_up && engine_base {BASE_IMAGE} && env -0").split("\0")
        for name, _, value in (variable.partition("=") for variable in variables):
            if name in {"DOCKER_HOST", "DOCKER_CONFIG"}:
                monkeypatch.setenv(name, value)
        # The base image brings the local wheels; with torch among them, no index need have it.
        if any(Path(os.environ.get("PIP_FIND_LINKS", "/nowhere")).glob("torch-*.whl")):
            monkeypatch.setenv("TORCH_INDEX_URL", "")
        try:
            yield
        finally:
            _in_bash("engine_down")


def _in_bash(commands):
    return run("bash", "-c", f"source {ENGINE} && {commands}", timeout_s=300)


class Stack:
    """One `docker compose` project, with ports of its own.

    Args:
        files: Compose files beside docker-compose.yml.
    """

    def __init__(self, *files):
        files = [ROOT / "docker-compose.yml", *files]
        self._compose = ["docker", "compose", "-p", PROJECT, *(f"-f{file}" for file in files)]

    def __call__(self, *arguments, timeout_s=60.0):
        return run(*self._compose, *arguments, timeout_s=timeout_s)

    def up(self, *options):
        words = ("up", "--detach", "--no-build", "--wait", "--wait-timeout", 180, *options)
        try:
            self(*words, timeout_s=200)
        except AssertionError:
            print(self.last_words())  # its containers are gone before anyone else could look
            raise

    def down(self, *, volumes=True):
        self("down", *(["--volumes"] if volumes else []), "--timeout", 20)

    def inspect(self, service):
        return json.loads(run("docker", "inspect", self("ps", "-aq", service).strip()))[0]

    def containers(self):
        """Returns what `docker compose ps -a` tells of each service."""
        lines = self("ps", "-a", "--format", "json").splitlines()
        return {container["Service"]: container for container in map(json.loads, lines)}

    def last_words(self):
        """Returns the state of all containers and the end of their logs."""
        return self("--profile", "*", "ps", "--all") + self(
            *("--profile", "*", "logs", "--no-color", "--timestamps", "--tail", 100)
        )

    def config(self):
        """Returns what Compose makes of the files and settings."""
        return json.loads(self("--profile", "*", "config", "--format", "json"))

    def learner_log(self):
        return self("logs", "--no-log-prefix", "learner")

    def progress(self):
        """Returns the run folder that the learner writes to, and the env steps and version shown last."""
        folder, _, log = self.learner_log().rpartition("run folder ")[2].partition("\n")
        lines = re.findall(r"steps ([\d,]+) .* version (\d+)", log)
        steps, version = lines[-1] if lines else ("0", "0")
        return folder, int(steps.replace(",", "")), int(version)

    def wait_for_progress(self, steps, versions, message):
        """Waits until the run has so many more env steps, and as many more versions of weights."""
        _, begun, first = self.progress()

        def further():
            _, now, last = self.progress()
            return now >= begun + steps and last >= first + versions

        wait_until(further, 90, message)

    def kill(self, service):
        """Kills the first process of a service's container, and waits until the engine has started it again."""
        before = self.inspect(service)["RestartCount"]
        # Not `docker kill`, which the engine takes for a person's wish and does not restart.
        os.kill(self.inspect(service)["State"]["Pid"], signal.SIGKILL)
        wait_until(lambda: self.inspect(service)["RestartCount"] == before + 1, 30, "restarted")

    def wait_for_log(self, condition, timeout_s, message):
        """Waits until the learner's log fulfils a condition."""
        wait_until(lambda: condition(self.learner_log()), timeout_s, message)
