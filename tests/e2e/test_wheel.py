"""The built wheel, installed outside the checkout, is all that training needs."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from tests.e2e.command import CARTPOLE, SMALL, settings
from tests.wheel import build_wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# Neither the checkout nor what it has installed may leak in.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
FILES = """
import importlib, json
names = ["", ".types", ".services.env_server", ".services.policy_server", ".services.buffer_server"]
print(json.dumps([importlib.import_module("rlightning" + name).__file__ for name in names]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment with this wheel, and, unlike `make prove-wheel`, the libraries from here."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    # A path in a .pth file: its own .pth files, such as that of the editable install, do not count.
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(program, *arguments, cwd):
    return subprocess.run(
        [str(program), *map(str, arguments)],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_is_in_the_wheel(tmp_path):
    names = zipfile.ZipFile(build_wheel(tmp_path)).namelist()
    assert {name.partition("/")[0].split("-")[0] for name in names} == {"rlightning"}
    for needed in ("py.typed", "v1/env_ret_pb2.pyi", "cluster/templates/config.yaml.tmpl"):
        assert f"rlightning/{needed}" in names
    for needed in ("index.html", "app.js", "app.css", "uplot/uPlot.iife.min.js", "uplot/LICENSE"):
        assert f"rlightning/cluster/dashboard/page/{needed}" in names
    for service in ("env_server", "policy_server", "buffer_server"):
        assert f"rlightning/services/{service}/__main__.py" in names


def test_everything_comes_from_the_wheel(installed, tmp_path):
    files = json.loads(run(installed, "-c", FILES, cwd=tmp_path).stdout)
    assert all(file.startswith(str(installed.parents[1])) for file in files)
    imported = run(installed, "-c", "import services", cwd=tmp_path)
    assert "ModuleNotFoundError: No module named 'services'" in imported.stderr


def test_it_trains(installed, tmp_path):
    command = installed.with_name("rlightning")
    config = tmp_path / "config.yaml"
    config.write_text(CARTPOLE.read_text())
    trained = run(command, "train", config, *settings(*SMALL), "--json", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["outcome"] == "finished"


def test_it_writes_a_project(installed, tmp_path):
    command = installed.with_name("rlightning")
    assert run(command, "init", "project", cwd=tmp_path).returncode == 0
    assert (tmp_path / "project" / "my_policy.py").exists()
