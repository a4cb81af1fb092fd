"""Code of a user's, as docs/your-code.md has it: mounted into the containers, or in an image that is derived from ours."""

import csv
import os
import re
import shutil

import pytest

from tests.docker.stack import HERE, ROOT, SERVICES, Stack, run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.fixture
def project(tmp_path):
    """What `rlightning init` writes, made in an image, beside files of tests/docker/project."""
    here = ["--user", f"{os.getuid()}:{os.getgid()}", "-v", f"{tmp_path}:/here"]
    run("docker", "run", "--rm", *here, "rlightning/env_server", "rlightning", "init", "/here/code")
    return shutil.copytree(HERE / "project", tmp_path / "code", dirs_exist_ok=True)


@pytest.fixture
def stack(project, monkeypatch):
    """A stack with that folder for ./project; nothing of it is left afterwards."""
    monkeypatch.setenv("PROJECT", str(project))
    monkeypatch.setenv("CONFIG", "project/arm.yaml")
    stack = Stack()
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


def test_envs_a_policy_and_a_function_of_yours_run_in_every_service_that_needs_them(stack, project):
    stack.wait_for_log(lambda log: "serving on" in log, 180, "solved")
    assert re.search(r"^solved: mean return -\d\.\d after ", stack.learner_log(), re.MULTILINE)
    text = stack("exec", "-T", "learner", "cat", "/runs/reach/latest/episodes.csv")
    envs = {row["env"].partition("-")[0] for row in csv.DictReader(text.splitlines())}
    assert envs == {"reach", "arm"}
    assert stack("logs", "--no-log-prefix", "buffer_server").count("rewards are scaled") == 1
    for name in (*SERVICES, "learner", "dashboard"):
        (mount,) = (m for m in stack.inspect(name)["Mounts"] if m["Source"] == str(project))
        assert (mount["Destination"], mount["RW"]) == ("/app/project", False)


def test_an_image_is_derived_in_the_two_lines_of_the_documentation(tmp_path):
    text = (ROOT / "docs" / "your-code.md").read_text()
    (lines,) = re.findall(r"```dockerfile\n(.*?)```", text, re.DOTALL)
    (tmp_path / "Dockerfile").write_text(lines)
    image = "rlightning-test/derived"
    run("docker", "build", "-q", "-t", image, tmp_path, timeout_s=300)
    code = "import gymnasium as g; print(g.make('HalfCheetah-v5').reset(seed=0)[0].shape)"
    closed = ["--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--user=10001:10001"]
    made = run("docker", "run", *closed, image, "python", "-c", code)
    run("docker", "image", "rm", image)
    assert made == "(17,)\n"
