"""The five commands of docs/remote-clients.md as they are written there, from keys to an env attached from another machine."""

import csv
import os
import re
import shutil
import signal
import subprocess
import venv

import pytest

from tests.docker.stack import PROJECT, ROOT, Stack, wait_until
from tests.netns.link import Link

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

PAGE = (ROOT / "docs" / "remote-clients.md").read_text()
HOST = "10.0.0.1"  # of the page; all that is replaced
# The first two blocks of commands: on the machine of the cluster, and on that of the env.
CLUSTER, CLIENT = (
    block.splitlines() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)[:2]
)


def checkout(folder):
    """Copies what a clone of the repository has of what the page uses."""
    names = [
        *re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE),
        *(".dockerignore", "docker-compose.yml", "compose.tls.yml", "configs", "project"),
    ]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def shell(command, folder, **options):
    """Runs one line of the page in a folder, and shows what it says."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, **options
    )
    print(f"$ {command}\n{done.stdout}{done.stderr}")
    assert done.returncode == 0


@pytest.fixture
def machine(built):
    """The machine of the env: nothing but a cable leads to that of the cluster."""
    with Link() as link:
        yield link


@pytest.fixture
def cluster(machine, tmp_path, monkeypatch):
    """The top folder of a repository on the machine of the cluster, with settings in `.env`."""
    for name in ("ENV_PORT", "POLICY_PORT", "BUFFER_PORT"):
        monkeypatch.delenv(name)  # those of the page; the address is no other's
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", PROJECT)
    folder = checkout(tmp_path / "cluster" / "rlightning")
    settings = [
        f"PUBLISH={machine.near}",
        "RLIGHTNING__TRAIN__TARGET_RETURN=1000",  # CartPole ends at 500: the run goes on
        "RLIGHTNING__TRAIN__MAX_ENV_STEPS=1000000000",
    ]
    (folder / ".env").write_text("".join(f"{line}\n" for line in settings))
    yield folder
    Stack().down()


def episodes_of_attached(stack):
    """Returns how many episodes of envs that clients attached have ended, as the learner knows it."""
    text = stack("exec", "-T", "learner", "cat", "/runs/cartpole/latest/episodes.csv")
    envs = [row["env"] for row in csv.DictReader(text.splitlines())]
    return sum(env.startswith("attached/") for env in envs)


def test_five_commands_lead_from_compose_up_to_an_env_attached_from_elsewhere(
    machine, cluster, tmp_path
):
    up, client = ([line.replace(HOST, machine.near) for line in one] for one in (CLUSTER, CLIENT))
    assert (len(up), len(client)) == (3, 2)
    for command in up:
        shell(command, cluster, timeout=600)

    # On the other machine: a checkout, a Python of its own, and two files copied over.
    folder = tmp_path / "client"
    shutil.copytree(cluster, folder / "rlightning", ignore=shutil.ignore_patterns("keys", ".env"))
    for name in ("ca.pem", "env.token"):
        shutil.copy(cluster / "keys" / name, folder)
    venv.create(folder / "venv", with_pip=True)
    variables = {**os.environ, "PATH": f"{folder / 'venv' / 'bin'}:{os.environ['PATH']}"}
    install, attach = client
    shell(install, folder, timeout=300, env=variables)  # the cable leads to no package index

    stack = Stack()
    words = [*machine.prefix, "bash", "-c", attach]
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(words, cwd=folder, env=variables, stdout=said, stderr=said)
        try:
            wait_until(
                lambda: episodes_of_attached(stack) or process.poll() is not None,
                120,
                "an episode of its env has ended",
            )
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
            said.seek(0)
            last_words = said.read()
            print(f"$ {attach}\n{last_words}")
    assert f"attaching CartPole-v1 to {machine.near}:50051 as " in last_words
    assert int(re.findall(r"steps ([\d,]+)", last_words)[-1].replace(",", "")) > 0
    assert episodes_of_attached(stack)
    # What it came in by is encrypted, and the only way in.
    ports = stack.inspect("env_server")["NetworkSettings"]["Ports"]
    assert ports["50443/tcp"] == [{"HostIp": machine.near, "HostPort": "50051"}]
    assert not ports["50051/tcp"]
