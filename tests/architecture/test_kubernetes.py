"""deploy/kubernetes against Kubernetes' own schemas, and against the code that it runs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import kubernetes_validate
import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

from rlightning.cli.app import app
from rlightning.cluster.keys import make_keys
from rlightning.cluster.learner_health import STILL_S
from rlightning.cluster.prepare import check_ranks
from rlightning.rpc.health import Health
from rlightning.utils.config import load_config
from tests.manifests import OVERLAYS, find, left_to_the_run, matches, pods, render
from tests.monitoring import scaling

ROOT = Path(__file__).resolve().parents[2]
SERVERS = {"env-server": "env", "policy-server": "policy", "buffer-server": "buffer"}
PROBES = {"startupProbe": "liveness", "livenessProbe": "liveness", "readinessProbe": "readiness"}
GRPC_NAMES = {"env": "EnvService", "policy": "PolicyService", "buffer": "BufferService"}

overlays = pytest.mark.parametrize("overlay", OVERLAYS)


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    """Returns the config that a container of the manifests runs with, loaded as it would load it."""

    def load(overlay, pod, container):
        (volume,) = (v for v in pod["spec"]["volumes"] if v["name"] == "config")
        files = find(overlay, "ConfigMap")[volume["configMap"]["name"]]["data"]
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "config")
        paths = []
        for option in container["command"]:
            if option.startswith("--config="):
                folder, _, name = option.removeprefix("--config=").rpartition("/")
                assert folder == mount["mountPath"]
                (tmp_path / name).write_text(files[name])
                paths.append(tmp_path / name)
        assert len(paths) == 2
        settings = [
            o.removeprefix("--set=") for o in container["command"] if o.startswith("--set=")
        ]
        for variable in container.get("env", ()):
            if variable["name"].startswith("RLIGHTNING__"):
                monkeypatch.setenv(variable["name"], variable["value"])
        return load_config(paths, settings)

    return load


def ours(overlay):
    """Yields name, pod and container of the services and the learner."""
    for name, pod in pods(overlay):
        if pod["metadata"]["labels"].get("app.kubernetes.io/part-of") == "rlightning":
            (container,) = pod["spec"]["containers"]
            yield name, pod, container


def options_of(container):
    """Returns what `rlightning` makes of the options of its container."""
    command = container["command"]
    name, *options = command[command.index("rlightning") + 1 :]
    parser = typer.main.get_command(app).commands[name]
    return parser.make_context(name, options).params


@pytest.mark.parametrize("version", ["1.30", "1.34", "1.37"])
def test_kubernetes_takes_the_manifests(version):
    different = {repr(manifest): manifest for overlay in OVERLAYS for manifest in render(overlay)}
    for manifest in different.values():
        kubernetes_validate.validate(manifest, version, strict=True)


def check_probes(container, port, health):
    """Asserts that what the kubelet asks for is there, and what each probe is for."""
    for probe, service in PROBES.items():
        assert container[probe]["grpc"] == {"port": port, "service": service}
        assert health.status_of(service) is not None


@overlays
def test_a_learner_is_given_the_time_that_its_services_may_be_away(overlay, config_of):
    ((pod, container),) = ((p, c) for name, p, c in ours(overlay) if name == "learner")
    probe = container["livenessProbe"]
    given_s = probe["periodSeconds"] * probe["failureThreshold"]
    window_s = config_of(overlay, pod, container).services.restart_window_s
    assert given_s > window_s + STILL_S + probe["periodSeconds"]


@overlays
def test_commands_ports_and_probes_are_those_of_the_services(overlay, config_of):
    seen = set()
    for name, pod, container in ours(overlay):
        seen.add(name)
        config = config_of(overlay, pod, container)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if name == "learner":
            assert options_of(container)["config"]
            assert config.learner.metrics == f"0.0.0.0:{ports['metrics']}"
            assert config.learner.health == f"0.0.0.0:{ports['health']}"
            check_probes(container, ports["health"], Health(()))
            continue
        part = SERVERS[name]
        section = getattr(config.services, part)
        assert container["command"][:2] == ["python", "-m"]
        assert container["command"][2] == f"rlightning.services.{part}_server"
        assert importlib.util.find_spec(container["command"][2])
        assert container["image"].startswith(f"rlightning/{part}_server:")
        assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == f"{part}_server"
        # The kubelet asks without TLS and without a token, at the address of the pod.
        listeners = {int(one.address.rpartition(":")[2]): one for one in section.listen}
        assert all(one.address.startswith("0.0.0.0:") for one in section.listen)
        assert {ports["grpc"]} == {p for p, one in listeners.items() if one.tls is None}
        assert set(listeners) == {port for key, port in ports.items() if key != "metrics"}
        assert section.metrics == f"0.0.0.0:{ports['metrics']}"
        health = Health([f"rlightning.v1.{GRPC_NAMES[part]}"])
        check_probes(container, ports["grpc"], health)
        dockerfile = (ROOT / "services" / f"{part}_server" / "Dockerfile").read_text()
        assert f"EXPOSE {ports['grpc']}" in dockerfile
    assert seen == {*SERVERS, "learner"}


@overlays
def test_what_a_manifest_names_is_there(overlay):
    claims = {*find(overlay, "PersistentVolumeClaim")}
    accounts, configs = find(overlay, "ServiceAccount"), find(overlay, "ConfigMap")
    templates = {
        (name, claim["metadata"]["name"])
        for name, one in find(overlay, "StatefulSet").items()
        for claim in one["spec"]["volumeClaimTemplates"]
    }
    for name, pod in pods(overlay):
        spec = pod["spec"]
        (container,) = spec["containers"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        own = {volume for owner, volume in templates if owner == name}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == volumes.keys() | own
        for volume in volumes.values():
            assert volume.get("configMap", {}).get("name", "") in {"", *configs}
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "") in {"", *claims}
            # Made by hand, of what `rlightning keys` writes.
            assert volume.get("secret", {}).get("secretName", "keys") == "keys"
        assert spec.get("serviceAccountName", "") in {"", *accounts}
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        probes = [container[kind] for kind in PROBES if kind in container]
        assert probes
        for probe in probes:
            if "grpc" in probe:
                assert probe["grpc"]["port"] in ports.values()
            else:
                assert probe["httpGet"]["port"] in ports
        # What is no config key is there for one that is.
        given = {variable["name"]: variable for variable in container.get("env", ())}
        used = {word for one in given.values() for word in re.findall(r"\$\((\w+)\)", str(one))}
        ours = {one for one in given if not one.startswith(("RLIGHTNING__", "GF_"))}
        assert used == ours
    for service in find(overlay, "Service").values():
        behind = [
            {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            for _, pod in pods(overlay)
            if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        assert len(behind) == 1
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= behind[0]


@overlays
def test_what_is_dialled_is_there(overlay, config_of):
    services = find(overlay, "Service")
    (_, pod, container), *_ = ours(overlay)
    config = config_of(overlay, pod, container)
    for part in ("env", "policy"):
        host, _, port = getattr(config.services, part).address.rpartition(":")
        assert host == f"{part}-server"
        assert services[host]["spec"]["ports"] == [
            {"name": "grpc", "port": int(port), "targetPort": "grpc"}
        ]
    shards = find(overlay, "StatefulSet")["buffer-server"]["spec"]
    (port,) = services[shards["serviceName"]]["spec"]["ports"]
    assert config.buffer_addresses == [
        f"buffer-server-{index}.{shards['serviceName']}:{port['port']}"
        for index in range(shards["replicas"])
    ]
    labels = {name: template["metadata"]["labels"] for name, template in pods(overlay)}
    for name in SERVERS:
        spec = services[name]["spec"]
        assert spec["clusterIP"] == "None"
        # Or whoever makes a service ready could not find it.
        assert spec["publishNotReadyAddresses"]
        assert [n for n, given in labels.items() if spec["selector"].items() <= given.items()] == [
            name
        ]


@overlays
def test_the_services_get_what_a_run_would_tell_those_that_it_starts(overlay, config_of):
    (_, pod, container), *_ = ours(overlay)
    assert left_to_the_run(config_of(overlay, pod, container)) == []


@overlays
def test_kept_is_what_lies_on_volumes(overlay, config_of):
    for name, pod, container in ours(overlay):
        config = config_of(overlay, pod, container)
        claimed = {v["name"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v}
        if name == "buffer-server":
            templates = find(overlay, "StatefulSet")[name]["spec"]["volumeClaimTemplates"]
            claimed |= {template["metadata"]["name"] for template in templates}
        mounts = {m["mountPath"] for m in container["volumeMounts"] if m["name"] in claimed}
        kept = {"buffer-server": config.buffer.data_dir, "learner": config.log.log_dir}.get(name)
        assert bool(mounts) == (kept is not None)
        assert all(Path(kept).is_relative_to(mount) for mount in mounts)


@overlays
def test_a_learner_that_is_started_again_goes_on_and_another_job_starts_anew(overlay, config_of):
    ((pod, container),) = ((p, c) for name, p, c in ours(overlay) if name == "learner")
    assert pod["spec"]["restartPolicy"] == "OnFailure"
    options = options_of(container)
    assert (options["resume"], options["or_anew"]) == ("latest", True)
    # A missed target would be missed again; a pod that was evicted has to be started again.
    assert (options["end_is_ok"], options["stop_is_ok"]) == (True, False)
    config = config_of(overlay, pod, container)
    # It need not be told to stop: the kernel or a lost node does not.
    assert config.train.save_interval > 0
    # Kubernetes fills in what another Job has another value of; so no checkpoint of that is found.
    (label,) = (v for v in container["env"] if v["name"] == "JOB")
    field = label["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.labels['batch.kubernetes.io/controller-uid']"
    assert config.log.log_dir == "/runs/$(JOB)"


@overlays
def test_pods_may_do_no_more_than_they_must(overlay, config_of):
    for name, pod in pods(overlay):
        spec = pod["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        assert spec["enableServiceLinks"] is False
        assert name == "prometheus" or spec["automountServiceAccountToken"] is False
    for _, pod, container in ours(overlay):
        grace_s = config_of(overlay, pod, container).services.grace_s
        # 2 s after its grace period, a stuck service ends itself.
        assert pod["spec"]["terminationGracePeriodSeconds"] > grace_s + 2
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001  # that of the Dockerfiles


@overlays
def test_budgets_and_autoscalers_are_of_what_there_is(overlay):
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(overlay)}
    for name, budget in find(overlay, "PodDisruptionBudget").items():
        found = [n for n, given in labels.items() if matches(budget["spec"]["selector"], given)]
        assert found == [name]
    assert find(overlay, "PodDisruptionBudget").keys() == SERVERS.keys()
    scaled_by = {
        "policy-server": "rlightning_queue_wait_seconds",
        "env-server": "rlightning_learner_wait_ratio",
    }
    scalers = find(overlay, "HorizontalPodAutoscaler")
    assert scalers.keys() == (scaled_by.keys() if overlay == "overlays/all" else set())
    for name, scaler in scalers.items():
        target = find(overlay, scaler["spec"]["scaleTargetRef"]["kind"])[
            scaler["spec"]["scaleTargetRef"]["name"]
        ]
        assert "replicas" not in target["spec"]
        for metric in scaler["spec"]["metrics"]:
            kind = metric["type"].lower()
            assert metric[kind]["metric"]["name"] == scaled_by[name]
            assert scaled_by[name] in {known["name"]["as"] for known in scaling()}


def may_reach(overlay, source, target, port):
    """Says whether the network policies let pods with the labels of `source` reach a port of `target`."""
    policies = [policy["spec"] for policy in find(overlay, "NetworkPolicy").values()]

    def allows(rule, peers, other):
        there = peers not in rule or any(
            matches(peer["podSelector"], other) for peer in rule[peers]
        )
        return there and ("ports" not in rule or port in [each["port"] for each in rule["ports"]])

    def allowed(kind, peers, pod, other):
        applied = [
            p for p in policies if kind in p["policyTypes"] and matches(p["podSelector"], pod)
        ]
        rules = [rule for policy in applied for rule in policy.get(kind.lower(), ())]
        return not applied or any(allows(rule, peers, other) for rule in rules)

    return allowed("Egress", "to", source, target) and allowed("Ingress", "from", target, source)


@overlays
def test_the_network_lets_through_who_has_to_and_nobody_else(overlay):
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(overlay)}
    labels["client"] = {"rlightning/env-client": "true"}
    labels["stranger"] = {"app": "stranger"}
    grpc = {"env-server": 50051, "policy-server": 50052, "buffer-server": 50053}
    reached = {
        (source, target)
        for target, port in grpc.items()
        for source in labels
        if may_reach(overlay, labels[source], labels[target], port)
    }
    assert reached == {
        ("client", "env-server"),
        ("env-server", "policy-server"),
        ("env-server", "buffer-server"),
        ("policy-server", "policy-server"),
        *(("learner", target) for target in grpc),
    }
    for target, _, container in ours(overlay):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}

        def readers(port, target=target):
            return [n for n in labels if may_reach(overlay, labels[n], labels[target], port)]

        assert readers(ports["metrics"]) == (["prometheus"] if "prometheus" in labels else [])
        if "health" in ports:  # only the kubelet, who always may
            assert readers(ports["health"]) == []
    public = may_reach(overlay, labels["stranger"], labels["env-server"], 50443)
    assert public == ("env-server-public" in find(overlay, "Service"))


def test_what_the_load_balancer_reaches_is_the_listener_with_tls_and_its_files_are_those_of_keys(
    config_of, tmp_path
):
    ((pod, container),) = ((p, c) for name, p, c in ours("overlays/all") if name == "env-server")
    (listener,) = (
        one
        for one in config_of("overlays/all", pod, container).services.env.listen
        if one.tls is not None
    )
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    (public,) = find("overlays/all", "Service")["env-server-public"]["spec"]["ports"]
    assert ports[public["targetPort"]] == int(listener.address.rpartition(":")[2])
    # A client of docs/remote-clients.md dials the same port as with compose.
    assert public["port"] == 50051
    made = make_keys(tmp_path / "keys", ["localhost"])
    (volume,) = (v["secret"] for v in pod["spec"]["volumes"] if "secret" in v)
    (mount,) = (m for m in container["volumeMounts"] if m["name"] == volume["secretName"])
    for file in (listener.tls.cert_file, listener.tls.key_file, listener.tokens):
        assert Path(file).parent == Path(mount["mountPath"])
        assert Path(file).name in {one.name for one in made}


def test_on_gpus_run_policy_server_and_learner_alone():
    wants = {
        name
        for name, _, container in ours("overlays/gpu")
        if "nvidia.com/gpu" in container["resources"]["limits"]
    }
    assert wants == {"policy-server", "learner"}
    for name, pod, container in ours("overlays/gpu"):
        assert bool(pod["spec"].get("nodeSelector")) == (name in wants)
        # Nodes with GPUs keep everything else away.
        kept_for = [one["key"] for one in pod["spec"].get("tolerations", ())]
        assert kept_for == (["nvidia.com/gpu"] if name in wants else [])
        if name in wants:
            assert container["image"] == "rlightning/policy_server:cuda"


def test_ranks_that_torchrun_starts_share_one_buffer_and_have_a_gpu_each(config_of):
    found = {name: (pod, container) for name, pod, container in ours("overlays/torchrun")}
    pod, container = found["learner"]
    command = container["command"]
    at = command.index("rlightning")
    assert command[:3] == ["python", "-m", "torch.distributed.run"]
    assert importlib.util.find_spec(command[2])
    torchrun = get_args_parser().parse_args(command[3 : at + 1])
    assert (torchrun.standalone, torchrun.module) == (True, True)
    assert torchrun.local_addr == "127.0.0.1"
    ranks = int(torchrun.nproc_per_node)
    assert ranks == container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert importlib.util.find_spec("rlightning.__main__")
    config = config_of("overlays/torchrun", pod, container)
    assert config.train.parallel == "ddp"
    check_ranks(config, ranks, in_process=False)
    for other in SERVERS:
        buffers = config_of("overlays/torchrun", *found[other]).buffer
        assert buffers.storage == config.buffer.storage


def test_jobs_of_prometheus_are_called_as_in_compose():
    (config,) = (
        yaml.safe_load(manifest["data"]["prometheus.yml"])
        for manifest in render("overlays/monitoring")
        if manifest["kind"] == "ConfigMap"
        and "prometheus.yml" in manifest["data"]
        and "scrape_configs" in manifest["data"]["prometheus.yml"]
    )
    (job,) = config["scrape_configs"]
    (rule,) = (r for r in job["relabel_configs"] if r.get("target_label") == "job")
    assert rule["source_labels"] == ["__meta_kubernetes_pod_label_app_kubernetes_io_component"]
    components = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]
        for _, pod, _ in ours("overlays/monitoring")
    }
    compose = yaml.safe_load((ROOT / "deploy/monitoring/prometheus.yml").read_text())
    assert components == {one["job_name"] for one in compose["scrape_configs"]}


def test_prometheus_and_grafana_are_set_up_as_in_compose():
    (container,) = find("overlays/monitoring", "Deployment")["grafana"]["spec"]["template"]["spec"][
        "containers"
    ]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert {v["name"]: v["value"] for v in container["env"]} == compose["grafana"]["environment"]
    deployments = find("overlays/monitoring", "Deployment")
    for name in ("grafana", "prometheus"):
        (one,) = deployments[name]["spec"]["template"]["spec"]["containers"]
        assert one["image"] == compose[name]["image"]
        (port,) = one["ports"]
        (published,) = compose[name]["ports"]
        assert published.endswith(f":{port['containerPort']}")
        (served,) = find("overlays/monitoring", "Service")[name]["spec"]["ports"]
        assert served["port"] == port["containerPort"]
    (datasource,) = yaml.safe_load(
        (ROOT / "deploy/monitoring/grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    assert datasource["url"] == f"http://prometheus:{port['containerPort']}"
