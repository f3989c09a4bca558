"""The chart says what the manifests say, by a renderer of our own, which Helm's engine once agreed with."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.go_templates import Templates

HOUSE = Path(__file__).parents[2]
CHART = HOUSE / "deploy" / "helm" / "llmtap"
STANDALONE = HOUSE / "deploy" / "kubernetes" / "standalone.yaml"
SERVICE_MONITOR = HOUSE / "deploy" / "kubernetes" / "servicemonitor.yaml"


def values(**more: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found | more


def data(release: str = "llmtap", **more: Any) -> dict[str, Any]:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    return {
        "Values": values(**more),
        "Chart": {key[0].upper() + key[1:]: value for key, value in chart.items()},
        "Release": {"Name": release, "Service": "Helm"},
        "Template": {"BasePath": "templates"},
    }


def templates() -> Templates:
    files = sorted((CHART / "templates").iterdir())
    return Templates({f"templates/{file.name}": file.read_text() for file in files})


def rendered(release: str = "llmtap", **more: Any) -> dict[tuple[str, str], dict[str, Any]]:
    chart, found = templates(), {}
    for file in (CHART / "templates").glob("*.yaml"):
        for document in yaml.safe_load_all(chart.render(f"templates/{file.name}", data(release, **more))):
            if document is not None:
                found[document["kind"], document["metadata"]["name"]] = document
    return found


def manifests(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(file.read_text())}


def plain(document: dict[str, Any]) -> dict[str, Any]:
    """Without what only Helm adds: labels about the chart, and the checksum of the configuration."""
    labels = document["metadata"]["labels"]
    ours = ("app.kubernetes.io/name", "app.kubernetes.io/component")
    document["metadata"]["labels"] = {key: labels[key] for key in ours if key in labels}
    if document["kind"] == "Deployment":
        assert document["spec"]["template"]["metadata"].pop("annotations").keys() == {"checksum/config"}
    return document


def test_the_defaults_are_the_manifests() -> None:
    ours, theirs = manifests(STANDALONE), rendered()
    assert ours.keys() == theirs.keys()
    for key, document in ours.items():
        if key[0] == "ConfigMap":
            said = [tomllib.loads(d["data"]["llmtap.toml"]) for d in (document, theirs[key])]
            assert said[0] == said[1]
        else:
            assert plain(theirs[key]) == document, key


def test_the_service_monitor_is_that_of_the_manifests() -> None:
    on = {"enabled": True, "interval": "15s", "labels": {}}
    key = ("ServiceMonitor", "llmtap")
    assert plain(rendered(serviceMonitor=on)[key]) == manifests(SERVICE_MONITOR)[key]


def test_what_is_set_shows() -> None:
    found = rendered(
        upstream="http://x:1", workers=3, drainSeconds=600, env=[{"name": "A", "value": "b"}],
        captureVolume={"persistentVolumeClaim": {"claimName": "c"}}, replicas=1,
        imagePullSecrets=[{"name": "s"}],
        extraVolumes=[{"name": "ca", "configMap": {"name": "ca"}}],
        extraVolumeMounts=[{"name": "ca", "mountPath": "/etc/ca"}],
        nodeSelector={"a": "b"}, tolerations=[{"key": "gpu"}], podAnnotations={"x": "y"},
        affinity={"nodeAffinity": {}}, podDisruptionBudget={"enabled": False, "maxUnavailable": 1},
    )  # fmt: skip
    spec = found["Deployment", "llmtap"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["terminationGracePeriodSeconds"] == 630
    assert {"name": "A", "value": "b"} in container["env"]
    assert {"name": "llmtap-capture", "mountPath": "/var/lib/llmtap"} in container["volumeMounts"]
    assert {"name": "llmtap-capture", "persistentVolumeClaim": {"claimName": "c"}} in spec["volumes"]
    assert {"name": "ca", "configMap": {"name": "ca"}} in spec["volumes"]
    assert {"name": "ca", "mountPath": "/etc/ca"} in container["volumeMounts"]
    assert (spec["imagePullSecrets"], spec["nodeSelector"]) == ([{"name": "s"}], {"a": "b"})
    assert (spec["tolerations"], spec["affinity"]) == ([{"key": "gpu"}], {"nodeAffinity": {}})
    assert ("PodDisruptionBudget", "llmtap") not in found
    relay = tomllib.loads(found["ConfigMap", "llmtap"]["data"]["llmtap.toml"])["relay"]
    assert relay == {"upstream": "http://x:1", "workers": 3, "drain_timeout": "600s"}


def test_without_an_upstream_there_is_no_chart() -> None:
    with pytest.raises(AssertionError, match="the gateway's URL"):
        rendered(upstream="")


CLAIM = {"persistentVolumeClaim": {"claimName": "c"}}


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_claim_is_for_one_replica(replicas: int) -> None:
    with pytest.raises(AssertionError, match="captureVolume"):
        rendered(captureVolume=CLAIM, replicas=replicas)


def test_without_replicas_nothing_selects_pods() -> None:
    on = {"enabled": True, "interval": "15s", "labels": {}, "tlsConfig": {}}
    assert rendered(replicas=0, serviceMonitor=on).keys() == {("ConfigMap", "llmtap")}


def test_the_sidecar_is_a_container_that_stays() -> None:
    source = {"templates/_helpers.tpl": (CHART / "templates" / "_helpers.tpl").read_text()}
    pod = (
        'initContainers:\n  {{- include "llmtap.sidecar" . | nindent 2 }}\n'
        'volumes:\n  {{- include "llmtap.volumes" . | nindent 2 }}\n'
    )
    found = yaml.safe_load(Templates(source | {"pod": pod}).render("pod", data()))
    (container,) = found["initContainers"]
    assert container.pop("restartPolicy") == "Always"
    (alone,) = rendered()["Deployment", "llmtap"]["spec"]["template"]["spec"]["containers"]
    assert container == alone
    assert [v["name"] for v in found["volumes"]] == ["llmtap-config", "llmtap-run", "llmtap-capture"]


def test_every_value_is_used() -> None:
    text = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    for name in values():
        assert f".Values.{name}" in text, name
