"""The example manifests fit Kubernetes' own schemas, and the dashboard asks only for metrics that a gateway exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tokentrue.app.configuration import read
from tokentrue.app.wiring import ServeConfig
from tokentrue.gateway.metrics.registry import Metrics, build_page

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def objects() -> list[Any]:
    return [item for path in MANIFESTS for item in yaml.safe_load_all(path.read_text())]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_the_schemas(path: Path) -> None:
    for item in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


def test_a_misspelled_field_is_found() -> None:
    item = next(item for item in objects() if item["kind"] == "StatefulSet")
    item["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


def test_services_select_pods_that_exist_and_the_gateway_takes_its_arguments() -> None:
    pods = [
        item["spec"]["template"]["metadata"]["labels"]
        for item in objects()
        if item["kind"] in ("StatefulSet", "Deployment")
    ]
    assert all(item["spec"]["selector"] in pods for item in objects() if item["kind"] == "Service")
    gateway = next(
        item for item in objects() if item["metadata"]["name"] == "tokentrue-gateway" and item["kind"] == "StatefulSet"
    )
    arguments = gateway["spec"]["template"]["spec"]["containers"][0]["args"]
    sets = [flag.removeprefix("--set=") for flag in arguments if flag.startswith("--set=")]
    assert read(ServeConfig, None, sets, {}).server.address.endswith(".tokentrue-gateways:8000")


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "tokentrue.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"tokentrue_\w+", target["expr"])
    }
    page = build_page([Metrics().snapshot()])
    text = page.decode() if isinstance(page, bytes) else page
    known = set(re.findall(r"^# TYPE (\w+)", text, re.M))
    known |= {f"{name}_bucket" for name in known} | {f"{name}_total" for name in known}
    assert asked and asked <= known, asked - known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
