"""What a release ships: sdist and wheel are built, each extra is installed into an empty environment away from the
source tree, and the commands run there."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.installed import ROOT, Environment, build, installed, list_tracked, run
from tokentrue import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KEY = "a-key-of-at-least-sixteen-characters"
IMAGE = "localhost/tokentrue-gateway-of-a-test"
HEAVY = {"torch", "transformers", "pyarrow", "starlette", "matplotlib", "ray"}
CLIENT = """\
import json, os
import httpx
import tokentrue as tt

with tt.Client(os.environ["TOKENTRUE_URL"]) as client, client.session(group="task-7") as s:
    body = {"model": "policy", "messages": [{"role": "user", "content": "what is 12 plus 5?"}], "max_tokens": 16}
    answer = httpx.post(s.base_url + "/chat/completions", json=body, headers={"authorization": "Bearer " + s.api_key}, timeout=300)
    s.reward(1.0)
    (sample,) = s.samples()
    print(json.dumps([answer.json()["choices"][0]["message"]["content"], s.coverage().ratio, sample.reward, sum(sample.loss_mask)]))
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"tokentrue-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    with installed(wheel, "", tmp_path_factory.mktemp("base")) as environment:
        yield environment


@pytest.fixture(scope="module")
def gateway(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    with installed(wheel, "gateway", tmp_path_factory.mktemp("gateway")) as environment:
        yield environment


def test_the_wheel_has_every_file_of_the_package_and_the_licences(wheel: Path) -> None:
    """The wheel is made from the sdist, so the sdist has them, too."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        text = archive.read(f"tokentrue-{__version__}.dist-info/METADATA").decode()
    tracked = {name for name in list_tracked("tokentrue") if not name.endswith("README.md")}
    shipped = {name for name in names if name.startswith("tokentrue/") and not name.endswith("README.md")}
    assert shipped == tracked
    facts = email.message_from_string(text)
    licences = [name for name in tracked if "LICENSE" in name]
    assert set(facts.get_all("License-File")) == {"LICENSE", *licences} and len(licences) == 3
    assert {name.split("/licenses/")[1] for name in names if "/licenses/" in name} == {"LICENSE", *licences}
    assert "tokentrue/assets/calculator/README.md" in names, "the model's card says under which licence it ships"
    assert facts["License-Expression"] == "Apache-2.0 AND MIT" and facts["Requires-Python"] == ">=3.11"
    assert "Typing :: Typed" in facts.get_all("Classifier") and "tokentrue/py.typed" in names
    assert facts["Version"] == __version__ and "## Install" in facts.get_payload()


def test_the_sdist_has_what_a_packager_needs_and_no_tests(dist: Path) -> None:
    with tarfile.open(dist / f"tokentrue-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "constraints.txt"} <= names
    assert not [name for name in names if name.startswith("tests/")]


def test_the_base_is_a_client(base: Environment) -> None:
    assert not base.packages() & HEAVY
    base.pip("check")
    assert base.tokentrue("--version").stdout == f"tokentrue {__version__}\n"
    assert base.tokentrue("--help").stdout.startswith("usage: tokentrue COMMAND")
    where = base.python("import json, tokentrue; print(json.dumps(tokentrue.__file__))")
    assert not where.startswith(str(ROOT)), "away from the source tree"
    done = base.tokentrue("serve", code=2)
    missing = re.fullmatch(r"tokentrue serve: (\w+) is not installed: pip install '(.+)'\n", done.stderr)
    assert missing and missing[1] in {"starlette", "uvicorn"} and missing[2] == "tokentrue[gateway]"
    (base.work / "rows.parquet").write_bytes(b"PAR1")
    done = base.tokentrue("audit", "rows.parquet", code=2)
    assert "pip install 'tokentrue[parquet]'" in done.stderr and done.stderr.count("\n") == 1


def test_a_type_checker_reads_the_annotations(base: Environment) -> None:
    (base.work / "typed.py").write_text("import tokentrue as tt\nreveal_type(tt.Client)\nreveal_type(tt.verify)\n")
    command = [Path(sys.executable).with_name("pyright"), "--pythonpath", base.program("python"), "typed.py"]
    told = run(command, cwd=base.work).stdout
    assert '"tt.Client" is "type[Client]"' in told and "-> Verification" in told


def test_the_gateway_serves_the_base(gateway: Environment, base: Environment) -> None:
    assert not gateway.packages() & (HEAVY - {"starlette", "transformers"})
    gateway.pip("check")
    gateway.tokentrue("--help")
    (gateway.work / "script.jsonl").write_text(json.dumps({"text": "17"}) + "\n")
    flags = ("--engine", "scripted", "--script", "script.jsonl", "--port", "0")
    with gateway.running("serve", *flags, TOKENTRUE_ADMIN_KEY=KEY) as url:
        told = base.python(CLIENT, TOKENTRUE_URL=url, TOKENTRUE_ADMIN_KEY=KEY)
        assert told[:3] == ["17", 1.0, 1.0]
        base.tokentrue("samples", url, "-o", "samples.jsonl", TOKENTRUE_ADMIN_KEY=KEY)
        done = base.tokentrue("samples", url, "--format", "verl", "-o", "x", code=2, TOKENTRUE_ADMIN_KEY=KEY)
        assert "pip install 'tokentrue[parquet]'" in done.stderr
    assert "1 sample" in base.tokentrue("audit", "samples.jsonl").stdout
    with gateway.running("view", base.work / "samples.jsonl", "--port", "0") as url:
        page = urllib.request.urlopen(url, timeout=60).read().decode()
        assert "<title>" in page
        assert urllib.request.urlopen(f"{url}static/vendor/preact.js", timeout=60).status == 200


@pytest.mark.parametrize("extras", ["engine,train"])
def test_the_demo_runs_from_the_wheel(extras: str, wheel: Path, tmp_path: Path) -> None:
    with installed(wheel, extras, tmp_path / "engine") as environment:
        assert not environment.packages() & {"nvidia-cublas", "pyarrow"}
        environment.pip("check")
        environment.tokentrue("--help")
        short = ("--steps", "1", "--tasks", "2", "--heldout", "4", "--json")
        told = json.loads(environment.tokentrue("demo", *short).stdout)
        assert told["ok"] and told["coverage"] == 1.0 and told["differing"] == 0 and told["sampled"] > 0
        environment.tokentrue("audit", "out/demo/samples.jsonl")  # exit code 0: all certificates hold
        with environment.running("view", "out/demo/samples.jsonl", "--port", "0") as url:
            assert urllib.request.urlopen(url, timeout=60).status == 200


def test_the_image_of_the_gateway_is_built_without_a_network(wheel: Path, tmp_path: Path) -> None:
    """TOKENTRUE_TEST_PYTHON_IMAGE names an image with Python and pip that podman has: no registry is asked."""
    base_image = os.environ.get("TOKENTRUE_TEST_PYTHON_IMAGE")
    if base_image is None or shutil.which("podman") is None:
        pytest.skip("needs podman, and TOKENTRUE_TEST_PYTHON_IMAGE; hadolint reads the Dockerfile in make test")
    shutil.copyfile(ROOT / "Dockerfile", tmp_path / "Dockerfile")
    shutil.copyfile(ROOT / ".dockerignore", tmp_path / ".dockerignore")
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = podman("run", "--rm", "--network", "none", "--entrypoint", "python", base_image, "-c", ask).strip()
    chosen = ["--only-binary=:all:", "--python-version", version, "--constraint", ROOT / "constraints.txt"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *chosen, "--dest", tmp_path / "dist" / "wheels"]
    run([*command, f"{wheel}[gateway,postgres]"], cwd=tmp_path)
    argument = f"PYTHON_IMAGE={base_image}"
    flags = ["--pull=never", "--network", "none", "--build-arg", argument, "--target", "gateway", "--tag", IMAGE]
    podman("build", *flags, "--format", "docker", str(tmp_path))
    try:
        serve = ["serve", "--engine", "scripted", "--script", "/dev/null", "--store", "sqlite:/data/x.sqlite"]
        confined = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--network", "none", "--detach"]
        name = podman("run", *confined, "--env", f"TOKENTRUE_ADMIN_KEY={KEY}", IMAGE, *serve).strip()
        try:
            wait = "import urllib.request as u, time\nfor _ in range(120):\n try: print(u.urlopen('http://127.0.0.1:8000/ready').status); break\n except OSError: time.sleep(1)"
            assert podman("exec", name, "python", "-c", wait).strip() == "200"
            assert podman("exec", name, "id", "-u").strip() == "10001"
        finally:
            podman("rm", "--force", "--time", "5", name)
    finally:
        podman("rmi", "--force", IMAGE)


def podman(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
