"""What docker-compose.yml, .env.example and the Dockerfiles name is what the code has."""

import json
import re
import subprocess
import sys
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
import yaml

from rlightning.cli.app import app
from rlightning.cluster.learner_health import STILL_S
from rlightning.cluster.prepare import prepare
from rlightning.cluster.process import MALLOC_ENV
from rlightning.utils.config import load_config
from tests.manifests import left_to_the_run

ROOT = Path(__file__).parents[2]
COMPOSE_TEXT = (ROOT / "docker-compose.yml").read_text()
# As compose reads it: `${NAME:-default}` is a setting, and merge keys are merged.
VARIABLE = re.compile(r"\$\{(\w+):?-([^}]*)\}")
TLS_TEXT = (ROOT / "compose.tls.yml").read_text()


class ComposeLoader(yaml.SafeLoader):
    """Knows `!override`."""


def _overriding(loader, node):
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node)
    return loader.construct_sequence(node)


ComposeLoader.add_constructor("!override", _overriding)


def load(text):
    return yaml.load(VARIABLE.sub(lambda match: match[2], text), ComposeLoader)


COMPOSE, TLS = load(COMPOSE_TEXT), load(TLS_TEXT)
GPU = load((ROOT / "compose.gpu.yml").read_text())
SETTINGS = dict(
    re.findall(r"^#([A-Z][A-Z_]*)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
)
NAMES = ["configs/cartpole.yaml", "configs/docker/compose.yaml"]
FILES = [ROOT / name for name in NAMES]
PORTS = {"env_server": 50051, "policy_server": 50052, "buffer_server": 50053}
# Prometheus and Grafana are those of others.
OURS = {name: one for name, one in COMPOSE["services"].items() if "profiles" not in one}
services = pytest.mark.parametrize("name", PORTS)


def section(config, name):
    return getattr(config.services, name.removesuffix("_server"))


def dockerfile(name):
    """Returns the instructions of a Dockerfile as (word, rest), continued lines joined."""
    text = (ROOT / "services" / name / "Dockerfile").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(re.split(r"\s+", line, maxsplit=1)) for line in lines]


def instruction(name, word):
    """Returns the last instruction of one kind, which is the one that counts."""
    return [rest for kind, rest in dockerfile(name) if kind == word][-1]


def environment(name):
    return dict(pair.split("=", 1) for pair in instruction(name, "ENV").split())


def command_options(command):
    """Returns the options that a command of `rlightning` knows, and parses what it is given."""
    parser = typer.main.get_command(app).commands[command[0]]
    return parser.make_context(command[0], list(command[1:])).params


@services
def test_one_port_is_named_everywhere(name):
    port = PORTS[name]
    config = load_config(FILES, environ={})
    assert [one.address for one in section(config, name).listen] == [f"0.0.0.0:{port}"]
    assert section(config, name).dial_address == f"{name}:{port}"
    assert [entry.rpartition(":")[2] for entry in COMPOSE["services"][name]["ports"]] == [f"{port}"]
    assert instruction(name, "EXPOSE") == f"{port}"
    assert f"--listen 127.0.0.1:{port}" in (ROOT / "services" / name / "README.md").read_text()


def test_there_may_be_several_env_and_policy_servers():
    published = [
        port for one in OURS.values() for entry in one.get("ports", ()) for port in ports_of(entry)
    ]
    assert len(set(published)) == len(published)
    for name in ("env_server", "policy_server"):
        (entry,) = COMPOSE["services"][name]["ports"]
        assert len(ports_of(entry)) >= 10
    assert load_config(FILES, environ={}).services.env.replica == "auto"


def ports_of(entry):
    """Returns the ports of the host that an entry of `ports` may take."""
    first, _, last = entry.split(":")[1].partition("-")
    return range(int(first), int(last or first) + 1)


@services
def test_the_health_check_is_a_command_of_ours(name):
    options, _, words = instruction(name, "HEALTHCHECK").partition("CMD ")
    executable, *command = json.loads(words)
    assert executable == "rlightning"
    asked = command_options(command)
    assert asked["address"] == f"127.0.0.1:{PORTS[name]}"
    assert asked["check"] in {"", "liveness", "readiness"}
    # It answers before the engine gives it up.
    assert asked["timeout"] < float(re.search(r"--timeout=(\d+)s", options)[1])


@services
def test_images_run_what_compose_runs(name):
    command = json.loads(instruction(name, "CMD"))
    in_compose = " ".join(COMPOSE["services"][name]["command"])
    assert " ".join(command).replace("--config ", "--config=") == in_compose
    assert command[:3] == ["python", "-m", f"rlightning.services.{name}"]
    assert find_spec(command[2]) is not None
    usage = subprocess.run(
        [sys.executable, *command[1:3], "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "--config" in usage.stdout
    assert command[4::2] == NAMES


def test_the_learner_is_the_policy_image_with_another_command():
    learner, policy = COMPOSE["services"]["learner"], COMPOSE["services"]["policy_server"]
    assert (learner["image"], learner["build"]) == (policy["image"], policy["build"])
    assert learner["command"][0] == "rlightning"
    configs = [str(file) for file in command_options(learner["command"][1:])["config"]]
    assert configs == NAMES


def test_the_learner_has_a_health_check_of_its_own():
    learner = COMPOSE["services"]["learner"]
    _, executable, *command = learner["healthcheck"]["test"]
    assert executable == "rlightning"
    asked = command_options(command)
    config = load_config(FILES, environ={})
    # Within its container alone.
    assert asked["address"] == config.learner.health
    assert config.learner.health.startswith("127.0.0.1:")
    assert asked["check"] == "readiness"
    seconds = {key: int(learner["healthcheck"][key][:-1]) for key in ("interval", "timeout")}
    assert asked["timeout"] < seconds["timeout"]
    # It does not come round while it waits for a service that is away.
    window_s = max(config.services.restart_window_s, config.services.policy.rpc.resume_window_s)
    assert seconds["interval"] * learner["healthcheck"]["retries"] > window_s + STILL_S


def test_a_learner_that_ended_or_was_stopped_is_not_started_again():
    learner = COMPOSE["services"]["learner"]
    assert learner["restart"] == "on-failure"
    options = command_options(learner["command"][1:])
    assert (options["end_is_ok"], options["stop_is_ok"]) == (True, True)


def test_no_command_lets_anyone_in_on_a_published_port():
    for file in (COMPOSE, TLS, GPU):
        for service in file["services"].values():
            assert "--insecure" not in " ".join(service.get("command", ()))
    assert "INSECURE" not in "".join(SETTINGS)


def test_the_dashboard_is_the_env_image_with_another_command_and_may_only_look():
    dashboard, env = COMPOSE["services"]["dashboard"], COMPOSE["services"]["env_server"]
    assert (dashboard["image"], dashboard["build"]) == (env["image"], env["build"])
    assert dashboard["command"][:2] == ["rlightning", "dashboard"]
    options = command_options(dashboard["command"][1:])
    assert [str(file) for file in options["config"]] == NAMES
    port = options["listen"].rpartition(":")[2]
    assert dashboard["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f"http://127.0.0.1:{port}'" in dashboard["healthcheck"]["test"][-1]
    runs = load_config(FILES, environ={}).log.log_dir
    assert [v for v in dashboard["volumes"] if isinstance(v, str)] == [f"runs:{runs}:ro"]


def test_every_setting_is_explained_with_its_default():
    # PUBLISH has another default in compose.tls.yml, as its text says.
    used = dict(VARIABLE.findall(TLS_TEXT)) | dict(VARIABLE.findall(COMPOSE_TEXT))
    settings = {key: value for key, value in SETTINGS.items() if not key.startswith("RLIGHTNING__")}
    assert used == settings
    assert "${" not in VARIABLE.sub("", COMPOSE_TEXT + TLS_TEXT)


@services
def test_with_tls_what_is_published_is_encrypted_and_asks_for_a_token(name):
    config = load_config(FILES, environ=TLS["services"][name]["environment"])
    inner, outer = section(config, name).listen
    assert [inner] == section(load_config(FILES, environ={}), name).listen
    assert TLS["services"][name]["ports"] == [f"0.0.0.0:{PORTS[name]}:50443"]
    assert outer.address == "0.0.0.0:50443"
    assert not outer.plaintext
    files = {outer.tls.cert_file, outer.tls.key_file, outer.tokens}
    assert files == {f"/run/secrets/{secret}" for secret in TLS["services"][name]["secrets"]}
    assert set(TLS["services"][name]["secrets"]) == set(TLS["secrets"])


def test_the_gpu_file_changes_the_image_with_torch_alone():
    assert set(GPU["services"]) == {"policy_server", "learner"}
    for service in GPU["services"].values():
        assert service["build"] == {"args": {"TORCH_INDEX_URL": ""}}
        assert service["image"] == f"{COMPOSE['services']['learner']['image']}:cuda"


def installs(index_url):
    """Returns what pip is told while the image with torch is built, as the shell of the build splits it."""
    commands = [rest for word, rest in dockerfile("policy_server") if word == "RUN"]
    steps = [command for command in commands if command.startswith("python -m pip install")]
    done = subprocess.run(
        ["sh", "-euc", "python() { printf '%s ' \"$@\"; echo; }\n" + "\n".join(steps)],
        env={"TORCH_INDEX_URL": index_url, "EXTRA": "learn"},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return [line.split() for line in done.stdout.splitlines()]


def test_the_build_argument_says_from_where_torch_comes_and_nothing_else():
    cpu = SETTINGS["TORCH_INDEX_URL"]
    assert cpu == COMPOSE["services"]["learner"]["build"]["args"]["TORCH_INDEX_URL"]
    assert cpu.endswith("/whl/cpu")
    of_cpu, of_cuda = (
        installs(cpu),
        installs(GPU["services"]["learner"]["build"]["args"]["TORCH_INDEX_URL"]),
    )
    assert len(of_cpu) == len(of_cuda)
    differing = [(one, other) for one, other in zip(of_cpu, of_cuda, strict=True) if one != other]
    ((plain, cuda),) = differing
    # Without a URL it is the usual index, whose torch for Linux has CUDA.
    at = plain.index("--index-url")
    assert plain[:at] + plain[at + 2 :] == cuda
    assert (plain[at + 1], cuda[-1]) == (cpu, "torch")
    # Alone: that index has nothing else. What its wheel needs, such as CUDA's libraries, is installed after it.
    assert "--no-deps" in cuda
    rest = [one for one in of_cuda[of_cuda.index(cuda) + 1 :] if "-r" in one]
    assert rest
    assert not any("--no-deps" in one for one in rest)
    # Both have the version that everything was tried with, which a local version such as +cpu matches.
    assert cuda[cuda.index("-c") + 1] == "/build/constraints.txt"
    pinned = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert len(pinned) == 1
    assert "+" not in pinned[0]


DURABLE = {"RLIGHTNING__BUFFER": SETTINGS["RLIGHTNING__BUFFER"]}


def test_config_keys_among_the_settings_exist_and_show_their_defaults():
    keys = {key: value for key, value in SETTINGS.items() if key.startswith("RLIGHTNING__")}
    keys = {key: value for key, value in keys.items() if key not in DURABLE}
    assert len(keys) >= 3
    assert load_config(FILES, environ=keys) == load_config(FILES, environ={})


@pytest.mark.parametrize("config", ["cartpole.yaml", "cartpole_dqn.yaml"])
def test_the_setting_for_a_durable_buffer_fits_every_config(config):
    files = [ROOT / "configs" / config, FILES[1]]
    buffer = load_config(files, environ=DURABLE).buffer
    assert (buffer.durability, buffer.restore) == ("process", "latest")
    assert Path(buffer.data_dir).parts[:2] == ("/", "buffer")
    assert buffer.capacity == load_config(files, environ={}).buffer.capacity


@pytest.mark.parametrize("config", ["cartpole.yaml", "cartpole_dqn.yaml", "minimal.yaml"])
def test_every_config_takes_what_compose_adds(config):
    loaded = load_config([ROOT / "configs" / config, FILES[1]], environ={})
    assert loaded.train.after_target == "serve"
    # What `prepare` gives to services that a run starts itself.
    buffer = prepare(loaded).buffer
    assert loaded.buffer.auto_truncate_episode >= buffer.auto_truncate_episode


@pytest.mark.parametrize("config", ["cartpole.yaml", "cartpole_dqn.yaml"])
def test_services_get_what_a_run_would_tell_those_that_it_starts(config):
    assert left_to_the_run(load_config([ROOT / "configs" / config, FILES[1]], environ={})) == []


@services
def test_build_arguments_are_those_of_the_dockerfile(name):
    known = dict(rest.partition("=")[::2] for word, rest in dockerfile(name) if word == "ARG")
    build = COMPOSE["services"][name]["build"]
    assert build["dockerfile"] == f"services/{name}/Dockerfile"
    assert build["args"].items() <= known.items()


@services
def test_dockerfiles_copy_what_the_build_gets(name):
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for word, rest in dockerfile(name):
        if word == "COPY" and not rest.startswith("--from"):
            for path in rest.split()[:-1]:
                assert (ROOT / path).exists()
                assert f"!{path}" in ignored


@services
def test_dockerfiles_need_no_extension_of_the_builder(name):
    text = (ROOT / "services" / name / "Dockerfile").read_text()
    assert not re.search(r"^# *syntax|--mount|<<", text, re.MULTILINE)


@services
def test_containers_may_do_nothing_but_serve(name):
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(entry.startswith("127.0.0.1:") for entry in service["ports"])
    assert not re.match(r"0|root", instruction(name, "USER"))
    assert instruction(name, "STOPSIGNAL") == "SIGTERM"


@services
def test_a_service_is_not_killed_while_it_drains(name):
    from rlightning.rpc import run

    grace_s = load_config(FILES, environ={}).services.grace_s + run._MARGIN_S
    assert int(COMPOSE["services"][name]["stop_grace_period"].removesuffix("s")) > grace_s


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_container_hears_sigterm_from_its_first_moment_on(name):
    assert COMPOSE["services"][name]["init"] is True


@services
def test_images_set_malloc_as_the_launcher_does(name):
    assert environment(name).items() >= MALLOC_ENV.items()


def test_who_starts_a_service_by_hand_is_told_of_malloc():
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}={value}`" in readme for name, value in MALLOC_ENV.items())


def test_what_is_kept_is_on_a_volume_that_the_image_gives_to_its_user():
    config = load_config(FILES, environ={})
    kept = {"policy_server": ("weights", config.policy.state_dir)}
    kept["learner"] = ("runs", config.log.log_dir)
    kept["buffer_server"] = ("buffer", "/buffer")
    for service, (volume, folder) in kept.items():
        assert f"{volume}:{folder}" in COMPOSE["services"][service]["volumes"]
        image = COMPOSE["services"][service]["image"].removeprefix("rlightning/")
        owned = [rest for word, rest in dockerfile(image) if word == "RUN" and "install -d" in rest]
        assert re.search(rf"-o 10001 .*{folder}\b", owned[0])
    of_others = COMPOSE["services"].keys() - OURS.keys()
    assert set(COMPOSE["volumes"]) == {volume for volume, _ in kept.values()} | of_others


def test_your_code_is_on_the_import_path():
    (path,) = load_config(FILES, environ={}).services.python_path
    for service in OURS.values():
        binds = [volume for volume in service["volumes"] if isinstance(volume, dict)]
        assert all(bind["read_only"] for bind in binds)
        assert path in {bind["target"] for bind in binds}
        assert all((ROOT / bind["source"]).is_dir() for bind in binds)


def fences(language):
    text = (ROOT / "docs" / "your-code.md").read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_an_image_of_yours_is_derived_in_two_lines_and_replaces_ours():
    (derived,), (override,) = fences("dockerfile"), fences("yaml")
    first, second = derived.splitlines()
    base, requirement = first.removeprefix("FROM "), second.rpartition("'rlightning[")[2]
    assert second.startswith("RUN python -m pip install ")
    assert requirement.removesuffix("]'") in metadata("rlightning").get_all("Provides-Extra")
    services = load(override)["services"]
    assert base in {COMPOSE["services"][name]["image"] for name in services}
    for service in services.values():
        assert service["build"] == {"context": "project"}
        assert service["image"] != base


@services
def test_what_a_derived_image_installs_is_found_and_belongs_to_its_user(name):
    base = environment(name)["PYTHONUSERBASE"]
    assert environment(name)["PATH"] == f"$PATH:{base}/bin"
    (made,) = (rest for word, rest in dockerfile(name) if word == "RUN" and "install -d" in rest)
    assert re.search(rf"-o 10001 -g 10001 .*{base}\b", made)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the images have Python 3.11, and tomllib")
@pytest.mark.parametrize("extra", ["serve", "buffer", "policy", "learn"])
def test_requirements_of_an_extra_are_those_of_the_package(extra):
    done = subprocess.run(
        [sys.executable, "deploy/requirements.py", extra],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    names = {re.match(r"[\w-]+", line)[0].lower() for line in done.stdout.splitlines()}
    assert {"grpcio", "gymnasium", "uvloop"} <= names
    assert ("torch" in names) == (extra in {"policy", "learn"})
    assert ("torchrl" in names) == (extra == "learn")
    assert "rlightning" not in names
