"""deploy/monitoring against the config, the compose file and the documents."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from rlightning.utils.config import load_config
from tests.monitoring import (
    DASHBOARD,
    MONITORING,
    alerts,
    expressions,
    panels,
    selectors,
    unmatched,
)

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = "docs/runbook.md"


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_every_alert_has_a_section_in_the_runbook(alert):
    name = alert["alert"]
    assert alert["annotations"]["runbook"] == f"{RUNBOOK}#{name.lower()}"
    sections = re.split(r"^## ", (ROOT / RUNBOOK).read_text(), flags=re.MULTILINE)[1:]
    (section,) = (one for one in sections if one.splitlines()[0] == name)
    assert len(section.split()) > 50  # what it means, and what to do
    # And what fires it is tested.
    tests = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    assert any(
        rule["alertname"] == name and rule.get("exp_alerts")
        for test in tests
        for rule in test["alert_rule_test"]
    )


def test_the_runbook_has_no_section_of_an_alert_that_is_gone():
    sections = re.findall(r"^## (\w+)$", (ROOT / RUNBOOK).read_text(), re.MULTILINE)
    assert sections == [alert["alert"] for alert in alerts()]


def test_prometheus_asks_each_service_where_compose_lets_it_show_its_metrics():
    config = load_config([ROOT / "configs/cartpole.yaml", ROOT / "configs/docker/compose.yaml"])
    shown = {
        **{
            f"{name}_server": getattr(config.services, name).metrics
            for name in ("env", "policy", "buffer")
        },
        "learner": config.learner.metrics,
    }
    asked = {}
    for job in yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]:
        (found,) = job["dns_sd_configs"]
        assert found["names"] == [job["job_name"]]
        asked[job["job_name"]] = f"0.0.0.0:{found['port']}"
    assert asked == shown
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert asked.keys() <= compose.keys()
    # A job in an expression is one of these.
    for where, expression in expressions():
        for _, patterns in selectors(expression):
            assert set(patterns.get("job", "learner").split("|")) <= asked.keys(), where


def test_a_series_is_whatever_stands_in_an_expression_where_one_does():
    series = [("rlightning_rows_total", {"job": "a"}), ("grpc_server_started_total", {})]
    for known in (
        'sum by (le, job) (rate(rlightning_rows_total{job=~"a"}[$__rate_interval])) > bool 1e3',
        "rlightning_rows_total offset 5m / on (job) group_left (x) grpc_server_started_total",
        'scalar(up{job="b"}) * inf or sum without (y) (rlightning_rows_total{<<.LabelMatchers>>})',
    ):
        assert unmatched(known, series) == []
    for name in ("rlightnin_rows_total", "row_total", "rlightning_rows", "grpc_server_started"):
        assert unmatched(f"sum by (job) (rate({name}[5m])) > 0", series) == [(name, {"": ""})]
        (missing,) = unmatched(f'up == 0 unless {name}{{job="a"}}', series)
        assert missing == (name, {"job": "a"})


def test_panels_do_not_overlap():
    assert len({panel["id"] for panel in panels()}) == len(panels())
    taken = [
        (x, y)
        for panel in panels()
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Grafana's models need Python 3.11")
def test_grafana_knows_every_field_of_the_dashboard():
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    written = json.loads(DASHBOARD.read_text())
    # What the models of Grafana do not know is lost on the way.
    known = json.loads(
        JSONEncoder(sort_keys=True, indent=None).encode(Dashboard.from_json(written))
    )
    assert list(lost(written, known)) == []
    assert list(lost({**written, "panel": []}, known)) == ["panel"]


def lost(before, after, path=""):
    """Yields where a part is missing, or another one."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from lost(*pair, f"{path}.{index}")
    elif before != after:
        yield path


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_what_compose_mounts_for_monitoring_is_there(name):
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    service = compose["services"][name]
    mounts = [volume for volume in service["volumes"] if isinstance(volume, dict)]
    assert mounts
    for mount in mounts:
        assert (ROOT / mount["source"]).is_dir()
        assert mount["read_only"]
    named = [volume.partition(":")[0] for volume in service["volumes"] if isinstance(volume, str)]
    assert set(named) <= compose["volumes"].keys()
    assert service["profiles"] == ["monitoring"]
