"""The example manifests fit Kubernetes' own schemas and give nothing more than is needed; the dashboard asks only for
metrics that a gateway exports."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tokentrue import __version__
from tokentrue.app.configuration import read
from tokentrue.app.wiring import ServeConfig
from tokentrue.gateway.metrics import Metrics, build_page

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
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


def pods() -> dict[str, Any]:
    """The pod of every workload, by the name of the workload."""
    return {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]
        for item in objects()
        if item["kind"] in ("StatefulSet", "Deployment")
    }


@pytest.mark.parametrize("name", ["tokentrue-gateway", "tokentrue-engine", "tokentrue-postgres"])
def test_containers_have_no_more_rights_than_they_need(name: str) -> None:
    pod = pods()[name]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert re.search(r":v?\d+\.\d+\.?\d*[\w.-]*$|@sha256:[0-9a-f]{64}$", container["image"]), container["image"]
        written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert "/tmp" in written, "something is always written to /tmp"


def test_passwords_come_from_a_secret_and_are_on_no_command_line() -> None:
    for name, pod in pods().items():
        for container in pod["containers"]:
            line = " ".join([*container.get("command", []), *container.get("args", [])])
            secret = {
                entry["name"] for entry in container.get("env", []) if "secretKeyRef" in entry.get("valueFrom", {})
            }
            assert not [variable for variable in secret if variable in line], (name, line)
            assert not re.search(r"://[^/@\s]*:[^/@\s]*@|password", line), (name, line)
            for entry in container.get("env", []):
                assert "value" not in entry or not re.search("KEY|PASSWORD|TOKEN|SECRET", entry["name"]), entry
    assert {"PGPASSWORD", "TOKENTRUE_ADMIN_KEY"} <= {
        entry["name"]
        for entry in pods()["tokentrue-gateway"]["containers"][0]["env"]
        if "secretKeyRef" in entry["valueFrom"]
    }


def test_the_network_lets_gateways_alone_reach_the_record_and_the_engine() -> None:
    policies = {item["metadata"]["name"]: item["spec"] for item in objects() if item["kind"] == "NetworkPolicy"}
    assert set(policies) == set(pods())
    for name, policy in policies.items():
        assert policy["podSelector"]["matchLabels"] == {"app": name}
        assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
        for rule in policy["ingress"]:
            assert rule["ports"] and rule["from"]
    for name in ("tokentrue-engine", "tokentrue-postgres"):
        (rule,) = policies[name]["ingress"]
        assert rule["from"] == [{"podSelector": {"matchLabels": {"app": "tokentrue-gateway"}}}]
        assert "egress" not in policies[name], "it reaches nobody"
    engine = pods()["tokentrue-engine"]["containers"][0]
    assert not [entry for entry in engine["env"] if entry["name"] == "VLLM_SERVER_DEV_MODE"]


def test_images_are_those_of_this_version() -> None:
    files = [ROOT / "compose.yaml", *MANIFESTS]
    tags = {tag for file in files for tag in re.findall(r"image: tokentrue:(\S+)-", file.read_text())}
    assert tags == {__version__}
    assert re.search(rf"^## (Unreleased|{re.escape(__version__)}\b)", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_compose_confines_its_containers() -> None:
    for service in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and "/tmp" in service["tmpfs"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert re.search(r":\d+\.\d+\.\d+", service["image"])
    (image,) = re.findall(r"^ARG PYTHON_IMAGE=(python:\d+\.\d+\.\d+-\S+)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert re.findall(r"^FROM (\S+)", (ROOT / "Dockerfile").read_text(), re.M) == ["${PYTHON_IMAGE}", "base", "base"]
    assert f"PYTHON_IMAGE ?= {image}\n" in (ROOT / "Makefile").read_text()


# Versions that mend the last known vulnerability of what reads bytes from the network.
MENDED = {
    "aiohttp": "3.13.3",
    "httptools": "0.6.4",
    "jinja2": "3.1.6",
    "msgspec": "0.19",
    "orjson": "3.11.5",
    "psycopg": "3.2.10",
    "starlette": "0.49.1",
    "uvicorn": "0.54",
}


@pytest.mark.parametrize("name", MENDED)
def test_what_faces_the_network_is_pinned_and_has_a_lower_bound(name: str) -> None:
    def version(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.M))
    assert pins[name] == metadata.version(name), "the version that the tests ran with"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    bounds = [found[1] for line in asked if (found := re.match(rf"{name}(?:\[\w+\])?>=([\d.]+)", line))]
    assert bounds and all(version(bound) >= version(MENDED[name]) for bound in bounds)


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "tokentrue.json").read_text())
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"tokentrue_\w+", target["expr"])
    }
    page = build_page(Metrics().registry.collect())
    text = page.decode() if isinstance(page, bytes) else page
    known = set(re.findall(r"^# TYPE (\w+)", text, re.M))
    known |= {f"{name}_bucket" for name in known} | {f"{name}_total" for name in known}
    assert asked and asked <= known, asked - known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
