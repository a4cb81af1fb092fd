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


def install(wheel, folder):
    """Makes an environment with this wheel and, unlike `make prove-wheel`, the libraries from here."""
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


def test_the_wheel_is_complete_and_trains_outside_the_checkout(tmp_path):
    wheel = build_wheel(tmp_path)
    check_names(zipfile.ZipFile(wheel).namelist())
    python, work = install(wheel, tmp_path), tmp_path / "work"
    work.mkdir()
    check_origin(python, work)
    rlightning = python.with_name("rlightning")
    assert run(rlightning, "init", "project", cwd=work).returncode == 0
    assert (work / "project" / "my_policy.py").exists()
    config = work / "config.yaml"
    config.write_text(CARTPOLE.read_text())
    trained = run(rlightning, "train", config, *settings(*SMALL), "--json", cwd=work)
    assert trained.returncode == 0, trained.stderr
    assert json.loads(trained.stdout)["outcome"] == "finished"


def check_names(names):
    assert {name.partition("/")[0].split("-")[0] for name in names} == {"rlightning"}
    for needed in ("py.typed", "v1/env_ret_pb2.pyi", "cluster/templates/config.yaml.tmpl"):
        assert f"rlightning/{needed}" in names
    for needed in ("index.html", "app.js", "app.css", "uplot/uPlot.iife.min.js", "uplot/LICENSE"):
        assert f"rlightning/cluster/dashboard/page/{needed}" in names
    for service in ("env_server", "policy_server", "buffer_server"):
        assert f"rlightning/services/{service}/__main__.py" in names


def check_origin(python, folder):
    """Everything comes from the wheel."""
    files = json.loads(run(python, "-c", FILES, cwd=folder).stdout)
    assert all(file.startswith(str(python.parents[1])) for file in files)
    imported = run(python, "-c", "import services", cwd=folder)
    assert "ModuleNotFoundError: No module named 'services'" in imported.stderr
