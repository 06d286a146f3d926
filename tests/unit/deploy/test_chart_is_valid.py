"""The chart renders for every file of values, into objects that Kubernetes, KEDA and the Prometheus operator accept."""

import json
import shutil
import subprocess

import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from tests.unit.deploy.chart import CHART, EXAMPLES, IMAGES, SCHEMAS, helm, missing, render, template

VERSIONS = ("1.29.0", "1.37.0")
OPERATOR = "prometheus-operator/monitoring.coreos.com/v1"
CUSTOM = {"ScaledObject": "keda/keda.sh/v1alpha1", "ServiceMonitor": OPERATOR, "PrometheusRule": OPERATOR}
MANY_NODES = "values-many-nodes.yaml"

VALIDATOR = """
import { pathToFileURL } from "node:url";
const [folder, ...objects] = process.argv.slice(1);
for (const text of objects) {
  const [module, object] = JSON.parse(text);
  const kind = object.kind;
  const models = await import(pathToFileURL(`${folder}/node_modules/@kubernetes-models/${module}/${kind}.js`));
  const model = new models[kind](object);
  model.validate();
}
"""


def known_values() -> set[str]:
    return {path.name for path in CHART.glob("values*.yaml")}


def test_every_file_of_values_is_tested():
    assert known_values() == set(EXAMPLES)


@pytest.mark.parametrize("values", EXAMPLES)
def test_helm_lint_finds_nothing(values):
    done = helm("lint", "--strict", ".", "--values", values)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", EXAMPLES)
def test_kubernetes_accepts_every_object(values, version):
    own = [found for found in render(values) if found["kind"] not in CUSTOM]
    assert len(own) > 10
    for found in own:
        kubernetes_validate.validate(found, version, strict=True)


def test_kubernetes_refuses_a_field_that_does_not_exist():
    """Guards the check above."""
    (service, *_) = (found for found in render() if found["kind"] == "Service")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {**service, "spec": {**service["spec"], "selectors": {}}}, VERSIONS[-1], strict=True
        )


def validate_custom(*objects) -> subprocess.CompletedProcess[str]:
    node = shutil.which("node") or missing("node")
    if not (SCHEMAS / "node_modules").is_dir():
        missing("chart-schemas")
    texts = [json.dumps([CUSTOM[found["kind"]], found]) for found in objects]
    command = [node, "--input-type=module", "--eval", VALIDATOR, str(SCHEMAS), *texts]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("values", "num_scaled", "num_watched"), [(MANY_NODES, 2, 3), (IMAGES, 1, 4)])
def test_keda_and_the_prometheus_operator_accept_their_objects(values, num_scaled, num_watched):
    custom = [found for found in render(values) if found["kind"] in CUSTOM]
    kinds = ["PrometheusRule"] * 2 + ["ScaledObject"] * num_scaled + ["ServiceMonitor"] * num_watched
    assert sorted(found["kind"] for found in custom) == kinds
    done = validate_custom(*custom)
    assert done.returncode == 0, done.stderr


def test_a_wrong_custom_object_is_refused():
    """Guards the check above."""
    scaled = next(found for found in render(MANY_NODES) if found["kind"] == "ScaledObject")
    done = validate_custom({**scaled, "spec": {**scaled["spec"], "minReplicaCount": "two"}})
    assert done.returncode != 0
    assert "minReplicaCount" in done.stderr


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("decode.replica=3", "'replica' not allowed"),
        ("prefill.autoscaling.busy=70", "/prefill/autoscaling/busy"),
        ("encode.enabled=2", "/encode/enabled"),
        ("encode.rdma.counts=1", "'counts' not allowed"),
        ("redis.url=http://redis", "/redis/url"),
        ("decode.autoscaling.enabled=true", "autoscaling.prometheusUrl is needed"),
        ("redis.enabled=false", "redis.url or redis.urlSecret is needed"),
    ],
)
def test_a_wrong_value_is_refused_by_name(setting, answer):
    done = template("--set", setting)
    assert done.returncode != 0
    assert answer in done.stderr


def test_every_value_is_in_the_schema():
    """The schema refuses other names, so a value that it lacks could not be set."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert set(schema["properties"]) == set(values) | {"global"}
    for name, part in values.items():
        properties = schema["properties"][name].get("properties")
        if properties is not None:
            assert set(properties) == set(part), name


def test_a_second_release_in_a_namespace_has_names_of_its_own():
    def names(release: str) -> set[tuple[str, str]]:
        objects = yaml.safe_load_all(template(release=release).stdout)
        return {(found["kind"], found["metadata"]["name"]) for found in objects if found}

    blue, green = names("baton-blue"), names("green")
    assert len(blue) == len(green)
    assert not blue & green
