"""examples/plugin, built and installed by pip beside the wheel, adds an engine, a format, a family and an environment to
the command line. tests/test_plugins.py examines the entry points themselves."""

from __future__ import annotations

import json
import math
import shutil
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.installed import ROOT, Environment, build, installed
from tokentrue.environments import SMALL_MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KEY = "a-key-of-at-least-sixteen-characters"
CALL = '<call lookup>{"word": "pens"}</call>'
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"properties": {"word": {"type": "string"}}}}}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    folder = tmp_path_factory.mktemp("plugin")
    (wheel,) = build(folder).glob("*.whl")
    with installed(wheel, "gateway", folder / "environment") as environment:
        environment.pip("install", "--quiet", "openai")
        shutil.copytree(ROOT / "examples" / "plugin", folder / "source")  # setuptools builds in the source tree
        environment.pip("install", "--quiet", "--no-deps", folder / "source")
        yield environment


def test_an_engine_an_environment_and_a_format(environment: Environment) -> None:
    env = {"TOKENTRUE_ADMIN_KEY": KEY}
    with environment.running("serve", "--engine", "bag", "--store", "memory", "--port", "0", **env) as url:
        small = ("--set", "rollout.tasks=2", "--set", "rollout.group_size=3", "--set", "rollout.max_tokens=24")
        flags = ("--set", "rollout.environment=echo", *small, "--url", url, "--out", "out", "--json")
        told = json.loads(environment.tokentrue("rollout", *flags, **env).stdout)
        assert told["rollouts"] == 6 and told["failed"] == 0
        environment.tokentrue("samples", url, "--format", "pairs", "-o", "pairs.jsonl", **env)
    rows = [json.loads(line) for line in (environment.work / "pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and {row["return"] for row in rows} <= {0.0, 1.0}
    for row in rows:
        pairs: list[Any] = row["pairs"]
        prompt = [token for token, trained, _ in pairs if not trained]
        sampled = [(token, logprob) for token, trained, logprob in pairs if trained]
        assert sampled and all(
            math.isclose(logprob, math.log(prompt.count(token) / len(prompt)), rel_tol=1e-12)
            for token, logprob in sampled
        ), "the engine's own log-probabilities reach the file"
    environment.tokentrue("audit", "pairs.jsonl")
    rows[0]["pairs"][-1][0] += 1
    (environment.work / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment.tokentrue("audit", "pairs.jsonl", code=1)  # recognised by its mark, and a changed token is found


def test_a_family(environment: Environment) -> None:
    model = environment.work / "model"
    shutil.copytree(SMALL_MODEL, model)
    template = (model / "chat_template.jinja").read_text()
    begin = template.index("{{- '<tool_call>")
    call = "{{- '<call ' + function.name + '>' + (function.arguments | tojson) + '</call>' }}"
    (model / "chat_template.jinja").write_text(
        template[:begin] + call + template[template.index("{%- endfor", begin) :]
    )
    (environment.work / "script.jsonl").write_text(json.dumps({"text": CALL}) + "\n")

    def ask() -> Any:
        flags = ("--model", model, "--engine", "scripted", "--script", "script.jsonl", "--store", "memory")
        with environment.running("serve", *flags, "--port", "0", TOKENTRUE_ADMIN_KEY=KEY) as url:
            opened = post(f"{url}/sessions", KEY, {})
            body = {"model": "policy", "messages": [{"role": "user", "content": "pens?"}], "tools": [TOOL]}
            return post(f"{opened['base_url']}/chat/completions", opened["api_key"], body)["choices"][0]["message"]

    (found,) = ask()["tool_calls"]
    assert found["function"] == {"name": "lookup", "arguments": '{"word": "pens"}'}
    environment.pip("uninstall", "--quiet", "--yes", "tokentrue-example")
    assert ask()["content"] == CALL, "without the plug-in the call is text"
    done = environment.tokentrue("serve", "--engine", "bag", "--port", "0", code=2)
    assert "no engine 'bag'; choose one of exact" in done.stderr


def post(url: str, key: str, body: object) -> Any:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.loads(urllib.request.urlopen(request, timeout=120).read())
