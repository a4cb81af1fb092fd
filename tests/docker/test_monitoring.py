"""deploy/monitoring with a real Prometheus: Debian's, which comes with promtool."""

import json
import shutil
import urllib.parse
import urllib.request

import pytest
import yaml

from tests.docker.stack import BASE_IMAGE, HERE, SERVICES, Stack, run, wait_until
from tests.manifests import KUBERNETES
from tests.monitoring import MONITORING, alerts, expressions

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

# Of buffers that keep a journal, which that of the stack does not.
DURABLE_ONLY = "panel Journals of buffer servers, p99"

IMAGE = f"""
FROM {BASE_IMAGE}
RUN install -d -o 65534 -g 65534 /prometheus
COPY prometheus /bin/prometheus
USER 65534
ENTRYPOINT ["/bin/prometheus"]
"""


def installed(name):
    path = shutil.which(name)
    assert path, f"{name} is missing: apt-get install --no-install-recommends prometheus"
    return path


def test_promtool_takes_the_config_and_each_alert_fires_on_what_it_is_for(tmp_path):
    promtool = installed("promtool")
    run(promtool, "check", "config", MONITORING / "prometheus.yml")
    # Debian's is built without Kubernetes' discovery of pods; the rest of that config it knows.
    config = yaml.safe_load((KUBERNETES / "components/monitoring/prometheus.yml").read_text())
    for job in config["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    run(promtool, "check", "config", "--syntax-only", tmp_path / "prometheus.yml")
    assert "SUCCESS" in run(promtool, "test", "rules", MONITORING / "alerts_test.yml")


@pytest.fixture
def stack(tmp_path, monkeypatch):
    """A cluster that trains, with Prometheus; nothing of it is left afterwards."""
    shutil.copy(installed("prometheus"), tmp_path)
    (tmp_path / "Dockerfile").write_text(IMAGE)
    run(
        "docker", "build", "--quiet", "--tag", "rlightning-test/prometheus", tmp_path, timeout_s=300
    )
    monkeypatch.setenv("PROMETHEUS_PORT", "0")
    stack = Stack(HERE / "longer.yml", HERE / "monitoring.yml")
    try:
        # All but Grafana, which Debian does not have.
        stack("up", "--detach", "--no-build", *SERVICES, "learner", "prometheus", timeout_s=200)
        yield stack
    finally:
        stack("--profile", "monitoring", "down", "--volumes", "--timeout", 20)


def test_prometheus_finds_the_services_and_every_panel_shows_something(stack):
    address = stack("port", "prometheus", 9090).strip()
    assert address.startswith("127.0.0.1:")

    def ask(path, **parameters):
        url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def up():
        try:
            targets = ask("targets", state="active")["activeTargets"]
        except OSError:  # it has not begun to listen
            return False
        states = sorted((target["labels"]["job"], target["health"]) for target in targets)
        return states == sorted((job, "up") for job in (*SERVICES, "learner"))

    wait_until(up, 120, "one target up for each service")
    (group,) = ask("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == {alert["alert"] for alert in alerts()}
    wait_until(
        lambda: all(r["health"] == "ok" for r in ask("rules")["groups"][0]["rules"]), 60, "ok"
    )

    def empty():
        return [
            where
            for where, expression in expressions()
            if where.startswith("panel")
            and "ALERTS" not in expression
            and where != DURABLE_ONLY
            and not ask("query", query=expression.replace("$__rate_interval", "1m"))["result"]
        ]

    wait_until(lambda: not empty(), 90, "every panel shows something")
    assert not ask("query", query='ALERTS{alertstate="firing"}')["result"]

    stack("stop", "policy_server")
    pending = 'ALERTS{alertname="ServiceDown", job="policy_server"}'
    wait_until(lambda: ask("query", query=pending)["result"], 60, "the missing service is seen")
