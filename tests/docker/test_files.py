"""What Compose and the engine make of the files beside docker-compose.yml."""

import pytest

from tests.docker.stack import ROOT, SERVICES, Stack, run

pytestmark = pytest.mark.docker

PORTS = {"env_server": 50051, "policy_server": 50052, "buffer_server": 50053}
ON_GPU = {"policy_server", "learner"}
OF_OTHERS = {"prometheus", "grafana"}


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """What `.env` may set, and other tests do, is not set."""
    for name in ("ENV_PORT", "POLICY_PORT", "BUFFER_PORT", "TORCH_INDEX_URL", "PUBLISH"):
        monkeypatch.delenv(name, raising=False)


def test_on_a_gpu_run_policy_server_and_learner_with_torch_for_cuda():
    stack = Stack(ROOT / "compose.gpu.yml")
    plain, services = Stack().config()["services"], stack.config()["services"]
    device = {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    for name in ON_GPU:
        build = services[name]["build"]
        assert services[name]["deploy"]["resources"]["reservations"]["devices"] == [device]
        assert services[name]["image"] == "rlightning/policy_server:cuda"
        # An empty one is the usual index, whose torch has CUDA; the rest is as without a GPU.
        assert plain[name]["build"]["args"]["TORCH_INDEX_URL"].endswith("/cpu")
        assert build["args"] == {**plain[name]["build"]["args"], "TORCH_INDEX_URL": ""}
        assert build["dockerfile"] == plain[name]["build"]["dockerfile"]
    rest = services.keys() - ON_GPU
    assert {name: services[name] for name in rest} == {name: plain[name] for name in rest}

    # The engine takes the reservation; to start it needs the driver.
    run("docker", "tag", "rlightning/policy_server", "rlightning/policy_server:cuda")
    try:
        stack("create", "--no-build", "policy_server")
        (request,) = stack.inspect("policy_server")["HostConfig"]["DeviceRequests"]
        assert (request["Driver"], request["Count"]) == ("nvidia", 1)
        assert request["Capabilities"] == [["gpu"]]
    finally:
        stack.down()
        run("docker", "image", "rm", "rlightning/policy_server:cuda")


def test_with_tls_keys_are_secrets_and_nothing_else_is_published(tmp_path, monkeypatch):
    monkeypatch.setenv("KEYS", str(tmp_path))
    config = Stack(ROOT / "compose.tls.yml").config()
    files = {name: f"{tmp_path}/{name}" for name in ("server.pem", "server.key", "tokens.yaml")}
    assert {name: secret["file"] for name, secret in config["secrets"].items()} == files
    for name in SERVICES:
        service = config["services"][name]
        given = {secret["source"]: secret["target"] for secret in service["secrets"]}
        assert given == {secret: f"/run/secrets/{secret}" for secret in files}
        (port,) = service["ports"]
        published = (port["host_ip"], port["published"], port["target"])
        assert published == ("0.0.0.0", str(PORTS[name]), 50443)
    for name in config["services"].keys() - set(SERVICES):
        assert "secrets" not in config["services"][name]


def test_monitoring_is_there_if_asked_for_on_a_network_of_its_own():
    stack = Stack()
    config = stack.config()
    asked = set(stack("--profile", "monitoring", "config", "--services").split())
    assert asked - set(stack("config", "--services").split()) == OF_OTHERS
    ours, others = config["services"].keys() - OF_OTHERS, OF_OTHERS
    assert {name for name in others if "cluster" in config["services"][name]["networks"]} == {
        "prometheus"
    }
    assert not any("monitoring" in config["services"][name]["networks"] for name in ours)
    for name in others:
        service = config["services"][name]
        assert service["profiles"] == ["monitoring"]
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert {port["host_ip"] for port in service["ports"]} == {"127.0.0.1"}
        mounts = [volume for volume in service["volumes"] if volume["type"] == "bind"]
        assert mounts
        assert all(volume["read_only"] for volume in mounts)
