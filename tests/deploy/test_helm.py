"""The chart says what the manifests say: rendered and linted by Helm's own engine (helm-python-sdk)."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip(
    "helm_python", reason="needs helm-python-sdk, which has no wheel for this platform"
)

HOUSE = Path(__file__).parents[2]
CHART = HOUSE / "deploy" / "helm" / "llmtap"
STANDALONE = HOUSE / "deploy" / "kubernetes" / "standalone.yaml"
SERVICE_MONITOR = HOUSE / "deploy" / "kubernetes" / "servicemonitor.yaml"


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def files(chart: Path = CHART, **more: Any) -> dict[str, str]:
    """Each rendered file, by its name in the chart. Raises HelmValuesError or HelmRenderError."""
    with helm.Chart.load(str(chart)) as loaded:
        rendered: dict[str, str] = loaded.render(more, name="llmtap", namespace="default")
    return rendered


def rendered(**more: Any) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for text in files(**more).values():
        for document in yaml.safe_load_all(text):
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


WARNING = 2
"""Severity of a linter's message; recommendations are below it, errors above."""


def test_the_linter_warns_of_nothing() -> None:
    report = helm.lint(str(CHART))
    assert report["total_charts_linted"] == 1
    assert [one for one in report["messages"] if one["severity"] >= WARNING] == report["errors"] == []


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
        upstream="http://x:1",
        workers=3,
        drainSeconds=600,
        env=[{"name": "A", "value": "b"}],
        captureVolume={"persistentVolumeClaim": {"claimName": "c"}},
        replicas=1,
        imagePullSecrets=[{"name": "s"}],
        extraVolumes=[{"name": "ca", "configMap": {"name": "ca"}}],
        extraVolumeMounts=[{"name": "ca", "mountPath": "/etc/ca"}],
        nodeSelector={"a": "b"},
        tolerations=[{"key": "gpu"}],
        podAnnotations={"x": "y"},
        affinity={"nodeAffinity": {}},
        podDisruptionBudget={"enabled": False, "maxUnavailable": 1},
    )
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


def test_an_ingress_leads_to_the_port_for_clients_alone() -> None:
    tls = [{"hosts": ["llm.test"], "secretName": "s"}]
    annotations = {"nginx.ingress.kubernetes.io/proxy-buffering": "off"}
    ingress = {"enabled": True, "className": "nginx", "hosts": ["llm.test"], "tls": tls}
    found = rendered(ingress=ingress | {"annotations": annotations}, service={"port": 80})
    document = found["Ingress", "llmtap"]
    assert document["metadata"]["annotations"] == annotations
    (rule,) = document["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert (rule["host"], path["path"], path["pathType"]) == ("llm.test", "/", "Prefix")
    assert path["backend"]["service"] == {"name": "llmtap", "port": {"number": 80}}
    assert (document["spec"]["ingressClassName"], document["spec"]["tls"]) == ("nginx", tls)


def test_an_autoscaler_sets_the_number_of_pods_in_place_of_replicas() -> None:
    found = rendered(autoscaling={"enabled": True, "maxReplicas": 5, "cpuPercent": 60})
    assert "replicas" not in found["Deployment", "llmtap"]["spec"]
    spec = found["HorizontalPodAutoscaler", "llmtap"]["spec"]
    assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llmtap"}
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 5)
    assert spec["metrics"][0]["resource"]["target"] == {"type": "Utilization", "averageUtilization": 60}


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"workers": 0}, "/workers"),
        ({"replicas": "two"}, "/replicas"),
        ({"upstram": "http://x"}, "upstram"),
        ({"upstream": "gateway:4000"}, "/upstream"),
        ({"service": {"port": 0}}, "/service/port"),
        ({"ingress": {"enabled": True}}, "/ingress/hosts"),
        ({"autoscaling": {"cpuPercent": 0}}, "/autoscaling/cpuPercent"),
        ({"adminSecret": ""}, "/adminSecret"),
    ],
)
def test_the_schema_names_a_wrong_value(wrong: dict[str, Any], place: str) -> None:
    with pytest.raises(helm.HelmValuesError, match=place):
        files(**wrong)


def test_the_schema_knows_every_value_and_no_other() -> None:
    def names(tree: Any) -> Any:
        return {key: names(value) for key, value in tree.items()} if isinstance(tree, dict) else None

    def known(schema: dict[str, Any]) -> Any:
        properties = schema.get("properties")
        return None if properties is None else {key: known(one) for key, one in properties.items()}

    expected = names(values())
    schema = known(json.loads((CHART / "values.schema.json").read_text()))
    assert schema.pop("global") is None, "Helm sets it"
    assert schema.keys() == expected.keys()
    for name, inner in schema.items():
        assert inner is None or inner.keys() == expected[name].keys(), name


def test_without_an_upstream_there_is_no_chart() -> None:
    with pytest.raises(helm.HelmRenderError, match="the gateway's URL"):
        files(upstream="")


CLAIM = {"persistentVolumeClaim": {"claimName": "c"}}


@pytest.mark.parametrize(
    "more", [{"replicas": 2}, {"replicas": 3}, {"replicas": 1, "autoscaling": {"enabled": True}}]
)
def test_a_claim_is_for_one_replica(more: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmRenderError, match="captureVolume"):
        files(captureVolume=CLAIM, **more)


def test_without_replicas_nothing_selects_pods() -> None:
    on = {"enabled": True, "interval": "15s", "labels": {}, "tlsConfig": {}}
    more = {"ingress": {"enabled": True, "hosts": ["a"]}, "autoscaling": {"enabled": True}}
    assert rendered(replicas=0, serviceMonitor=on, **more).keys() == {("ConfigMap", "llmtap")}


def test_the_sidecar_is_a_container_that_stays(tmp_path: Path) -> None:
    chart = shutil.copytree(CHART, tmp_path / "llmtap")
    (chart / "templates" / "pod.yaml").write_text(
        'initContainers:\n  {{- include "llmtap.sidecar" . | nindent 2 }}\n'
        'volumes:\n  {{- include "llmtap.volumes" . | nindent 2 }}\n'
    )
    found = yaml.safe_load(files(chart)["llmtap/templates/pod.yaml"])
    (container,) = found["initContainers"]
    assert container.pop("restartPolicy") == "Always"
    (alone,) = rendered()["Deployment", "llmtap"]["spec"]["template"]["spec"]["containers"]
    assert container == alone
    assert [v["name"] for v in found["volumes"]] == ["llmtap-config", "llmtap-run", "llmtap-capture"]


def test_every_value_is_used() -> None:
    text = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    for name in values():
        assert f".Values.{name}" in text, name
