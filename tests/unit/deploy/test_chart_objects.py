"""Objects of the chart fit together: selectors, ports, targets, secrets, network rules."""

import re

import pytest
import yaml  # type: ignore[import-untyped]

from baton.telemetry.metrics import declared
from tests.unit.deploy.chart import (
    EXAMPLES,
    IMAGES,
    NAMESPACE,
    RELEASE,
    ROOT,
    component,
    container,
    named,
    pod,
    render,
    selects,
    services,
    workers,
    workloads,
)

MANY_NODES = "values-many-nodes.yaml"
SUFFIXES = {"counter": "_total", "gauge": "", "histogram": "_sum"}

each_example = pytest.mark.parametrize("values", EXAMPLES)


def labels(workload) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def selected(objects, selector) -> list[str]:
    """Components whose pods a selector takes."""
    return [component(each) for each in workloads(objects) if selects(selector, labels(each))]


def port_names(workload) -> set[str]:
    return {port["name"] for port in container(workload)["ports"]}


@each_example
def test_every_selector_takes_the_pods_of_its_component(values):
    objects = render(values)
    for found in objects:
        spec = found.get("spec", {})
        match found["kind"]:
            case "Service":
                selector = spec["selector"]
            case "Deployment" | "StatefulSet" | "PodDisruptionBudget":
                selector = spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                selector = spec["podSelector"]["matchLabels"]
            case _:
                continue
        assert selected(objects, selector) == [component(found)], found["metadata"]["name"]


@each_example
def test_services_lead_to_ports_that_pods_have(values):
    objects = render(values)
    pods = {component(each): each for each in workloads(objects)}
    for service in named(objects, "Service").values():
        targets = {port["targetPort"] for port in service["spec"]["ports"]}
        assert targets <= port_names(pods[component(service)])
    for policy in named(objects, "NetworkPolicy").values():
        allowed = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())}
        assert allowed <= port_names(pods[component(policy)])


@each_example
def test_workers_have_a_headless_service_that_names_their_pods(values):
    objects = render(values)
    for role in workers(values):
        workload = services(objects)[role]
        service = named(objects, "Service")[workload["spec"]["serviceName"]]
        assert workload["kind"] == "StatefulSet"
        assert workload["spec"]["podManagementPolicy"] == "Parallel"
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True


@each_example
def test_every_mounted_volume_and_named_secret_exists(values):
    objects = render(values)
    made = named(objects, "Secret").keys() | named(objects, "ConfigMap").keys()
    given = {"baton-cluster", "baton-tls", "baton-keys", "baton-redis"} if values == MANY_NODES else set()
    for workload in workloads(objects):
        claims = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())}
        volumes = {each["name"]: each for each in pod(workload)["volumes"]}
        assert {each["name"] for each in container(workload)["volumeMounts"]} == volumes.keys() | claims
        sources = [each.get("secret", {}).get("secretName") for each in volumes.values()]
        sources += [each.get("configMap", {}).get("name") for each in volumes.values()]
        for variable in container(workload)["env"]:
            sources.append(variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name"))
        assert {source for source in sources if source} <= made | given


@each_example
def test_no_secret_is_readable_by_others_or_shown_in_a_command(values):
    for workload in workloads(render(values)):
        for volume in pod(workload)["volumes"]:
            assert volume.get("secret", {}).get("defaultMode", 0o440) == 0o440
        words = container(workload).get("command", []) + container(workload).get("args", [])
        assert not any(re.search(r"--requirepass|--a(uth|pi-key)", word) for word in words)


@each_example
def test_no_pod_runs_as_root_or_may_write_to_its_image(values):
    for workload in workloads(render(values)):
        security = container(workload)["securityContext"]
        assert pod(workload)["securityContext"]["runAsNonRoot"] is True
        assert pod(workload)["securityContext"]["runAsUser"] > 0
        assert pod(workload)["automountServiceAccountToken"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        assert set(security["capabilities"].get("add", [])) <= {"IPC_LOCK"}
        assert "memory" in container(workload)["resources"]["limits"]


@each_example
def test_worker_ports_are_open_to_routers_and_workers_only(values):
    objects = render(values)
    policies = {component(each): each for each in named(objects, "NetworkPolicy").values()}
    callers = {"router", "prefill", "decode"}
    for role in workers(values):
        rules = policies[role]["spec"]["ingress"]
        opened = {port["port"] for rule in rules for port in rule.get("ports", ())}
        assert opened == {"grpc", "metrics"} | (set() if role == "encode" else {"pages", "sessions"})
        for rule in rules:
            ports = {port["port"] for port in rule.get("ports", ())}
            peers = [peer.get("podSelector", {}).get("matchLabels", {}) for peer in rule["from"]]
            assert rule["from"], "an empty list would allow everyone"
            if ports == {"metrics"}:
                continue
            allowed = {name for peer in peers for name in selected(objects, peer)}
            assert all(peers)
            if role == "encode":
                assert (ports, allowed) in (({"grpc"}, callers - {"decode"}), (set(), {"prefill"}))
            elif ports:
                expected = {"grpc": callers, "pages": callers - {"router"}, "sessions": callers}
                assert allowed == expected[ports.pop()]
                assert not ports
            else:
                assert allowed - {"encode"} == callers - {"router"}
    assert [not rule.get("from") for rule in policies["router"]["spec"]["ingress"]] == [True, False]


@each_example
def test_every_process_reaches_the_store_and_is_drained_one_at_a_time(values):
    objects = render(values)
    expected = {"router", *workers(values)}
    budgets = [component(each) for each in named(objects, "PodDisruptionBudget").values()]
    assert sorted(budgets) == sorted(expected)
    for policy in named(objects, "NetworkPolicy").values():
        if component(policy) == "redis":
            ((rule,),) = (policy["spec"]["ingress"],)
            peers = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
            assert {name for peer in peers for name in selected(objects, peer)} == expected


def test_encode_workers_are_off_by_default():
    assert "encode" not in services(render())
    assert not any(component(found) == "encode" for found in render())
    found = services(render("values.yaml", "--set", "encode.enabled=true,encode.replicas=3"))["encode"]
    assert found["spec"]["replicas"] == 3


@pytest.mark.parametrize(("values", "opened"), [("values.yaml", False), (IMAGES, False), (MANY_NODES, True)])
def test_other_worker_ports_open_only_where_nixl_may_be_used(values, opened):
    policies = named(render(values), "NetworkPolicy").values()
    rules = [rule for each in policies if component(each) in workers(values) for rule in each["spec"]["ingress"]]
    assert any("ports" not in rule for rule in rules) is opened


@pytest.mark.parametrize(
    ("setting", "opened"),
    [
        ("workerSettings.transport=nixl", {"prefill": {"prefill", "decode", "encode"}, "encode": {"prefill"}}),
        ("encode.settings.transport=nixl", {"encode": {"prefill"}}),
        ("workerSettings.transport=stream", {}),
    ],
)
def test_embeddings_pass_between_prefill_and_encode_where_nixl_may(setting, opened):
    """On any port: UCX chooses its own. Both ways, since each side of a link answers the other."""
    objects = render("values.yaml", "--set", f"encode.enabled=true,{setting}")
    found = {}
    for policy in named(objects, "NetworkPolicy").values():
        for rule in policy["spec"]["ingress"]:
            if "ports" not in rule and component(policy) in ("prefill", "encode"):
                peers = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
                found[component(policy)] = {name for peer in peers for name in selected(objects, peer)}
    assert found == opened


def test_encode_workers_may_have_rdma_devices():
    sets = "encode.enabled=true,encode.rdma.resource=rdma/ib,encode.rdma.netDevices=mlx5_0:1"
    (made,) = services(render("values.yaml", "--set", sets))["encode"]["spec"]["template"]["spec"]["containers"]
    assert made["resources"]["limits"]["rdma/ib"] == 1
    assert {"name": "UCX_NET_DEVICES", "value": "mlx5_0:1"} in made["env"]


@pytest.mark.parametrize(("values", "scaled"), [(MANY_NODES, {"router", "prefill", "decode"}), (IMAGES, {"encode"})])
def test_autoscalers_own_the_number_of_pods_that_they_scale(values, scaled):
    objects = render(values)
    scalers = [*named(objects, "ScaledObject").values(), *named(objects, "HorizontalPodAutoscaler").values()]
    targets = {component(each): each["spec"]["scaleTargetRef"] for each in scalers}
    assert targets.keys() == scaled
    for name, workload in services(objects).items():
        if name not in scaled:
            assert "replicas" in workload["spec"]
            continue
        assert targets[name]["name"] == workload["metadata"]["name"]
        assert targets[name]["kind"] == workload["kind"]
        assert "replicas" not in workload["spec"]
    assert all("replicas" in each["spec"] for each in services(render()).values())
    assert not named(render(), "ScaledObject")


def test_scaling_queries_ask_for_metrics_of_this_release_that_exist():
    known = {
        family.name + SUFFIXES[family.type]: set(metric._labelnames)
        for metric in declared()
        for family in metric.describe()
    }
    scaled = {**named(render(MANY_NODES), "ScaledObject"), **named(render(IMAGES), "ScaledObject")}
    for found in scaled.values():
        for trigger in found["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            series = re.findall(r"(baton_\w+){([^}]*)}", query)
            assert len(series) == query.count("baton_")
            for name, matchers in series:
                assert f'namespace="{NAMESPACE}",release="{RELEASE}"' in matchers
                assert set(re.findall(r"(\w+)=~?\"", matchers)) - {"namespace", "release", "job"} <= known[name]
            assert float(trigger["metadata"]["threshold"]) > 0
    assert scaled.keys() == {"baton-prefill", "baton-decode", "baton-encode"}


@pytest.mark.parametrize("values", [MANY_NODES, IMAGES])
def test_prometheus_finds_every_kind_under_the_job_of_the_alerts(values):
    objects = render(values)
    monitors = named(objects, "ServiceMonitor").values()
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["endpoints"]
        chosen = [
            each
            for each in named(objects, "Service").values()
            if selects(monitor["spec"]["selector"]["matchLabels"], each["metadata"]["labels"])
            and endpoint["port"] in {port["name"] for port in each["spec"]["ports"]}  # others give no target
        ]
        (service,) = chosen
        assert component(service) == component(monitor)
        assert service["spec"]["clusterIP"] == "None", "metrics need no key: no address for clients"
        assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == component(monitor)
        assert {rule["targetLabel"] for rule in endpoint["relabelings"]} == {"worker", "release"}
        assert monitor["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert {component(each) for each in monitors} == {"router", *workers(values)}


def test_gpus_and_rdma_devices_are_requested():
    workload = services(render(MANY_NODES))["decode"]
    limits = container(workload)["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["rdma/hca"], limits["memory"]) == (1, 1, "192Gi")
    assert container(workload)["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    limits = container(services(render())["decode"])["resources"]["limits"]
    assert limits.keys() == {"memory"}


def test_rules_and_dashboards_are_those_of_docker():
    objects = render(MANY_NODES)
    rules = {name.rpartition("-")[2]: found["spec"] for name, found in named(objects, "PrometheusRule").items()}
    for name, spec in rules.items():
        assert spec == yaml.safe_load((ROOT / "docker" / "prometheus" / f"{name}.yml").read_text(encoding="utf-8"))
    assert rules.keys() == {"alerts", "recording"}
    boards = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docker/grafana/boards").glob("*.json")}
    assert named(objects, "ConfigMap")["baton-dashboards"]["data"] == boards
