"""A change of the source makes no layer with dependencies anew."""

import json
import re
import shutil
import time

import pytest
import yaml

from tests.docker.stack import ROOT, SERVICES, run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

# The wheel, its installation, and the user with its folders.
MADE_ANEW = 3


def layers(*images):
    """Returns the layers of each; one that is built again has another digest, whatever is in it."""
    lines = run("docker", "image", "inspect", "-f", "{{json .RootFS.Layers}}", *images)
    return [json.loads(line) or [] for line in lines.splitlines()]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what images are made of, whose images have names of their own."""
    names = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for name in (*names, ".dockerignore", "docker-compose.yml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    images = {name: {"image": f"rlightning-test/{name}"} for name in SERVICES}
    (tmp_path / "images.yml").write_text(yaml.safe_dump({"services": images}))
    yield tmp_path
    run("docker", "image", "rm", *(one["image"] for one in images.values()), check=False)


def test_a_change_of_the_source_installs_no_dependency_again(checkout):
    with (checkout / "rlightning" / "env" / "base_env.py").open("a") as source:
        source.write(f"# {time.time_ns()}\n")  # as nobody has built before
    # All, since images that are built at the same time may each have made a layer of their own.
    images = run("docker", "image", "ls", "--all", "--quiet", "--no-trunc").split()
    known = {layer for one in layers(*set(images)) for layer in one}
    files = [f"-f{checkout / name}" for name in ("docker-compose.yml", "images.yml")]
    began = time.monotonic()
    run("docker", "compose", *files, "build", *SERVICES, timeout_s=500)
    print(f"rebuilt after a change of one line in {time.monotonic() - began:.0f} s")
    for name in SERVICES:
        before, after = layers(f"rlightning/{name}", f"rlightning-test/{name}")
        assert len(after) == len(before)
        assert set(after[:-MADE_ANEW]) <= known
        assert not set(after[-MADE_ANEW:]) & known
