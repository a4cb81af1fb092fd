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


def layers(image):
    """Returns its layers; one that is built again has another digest, whatever is in it."""
    return json.loads(run("docker", "image", "inspect", "-f", "{{json .RootFS.Layers}}", image))


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
    files = [f"-f{checkout / name}" for name in ("docker-compose.yml", "images.yml")]

    def build():
        run("docker", "compose", *files, "build", *SERVICES, timeout_s=500)
        return {name: layers(f"rlightning-test/{name}") for name in SERVICES}

    # Images that are built at the same time may each make a layer of their own; from then on the newest is taken.
    before = build()
    with (checkout / "rlightning" / "env" / "base_env.py").open("a") as source:
        source.write(f"# {time.time_ns()}\n")  # as nobody has built before
    began = time.monotonic()
    after = build()
    print(f"rebuilt after a change of one line in {time.monotonic() - began:.0f} s")
    for name in SERVICES:
        assert after[name][:-MADE_ANEW] == before[name][:-MADE_ANEW]
        assert len(after[name]) == len(before[name])
        assert not set(after[name][-MADE_ANEW:]) & set(before[name])
