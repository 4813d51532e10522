"""Start-up errors are one line that says what to do, with exit code 2; never a stack trace."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import transformers  # `serve` in this process must find it loaded, or it would hide torch from all other tests  # noqa: F401

from tests.gateway.world import ROOT, TOOLS, model_dir, scripted_server, write_script
from tokentrue.app.background import embedded_gateway
from tokentrue.app.wiring import ServeConfig, ServerConfig
from tokentrue.cli.main import run
from tokentrue.errors import ConfigError
from tokentrue.gateway.serving.server import listen


def serve(*arguments: str) -> tuple[int, str]:
    """The command, in this process: every one of these ends before a server runs."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        code = run("serve", ["--store", "memory", *arguments])
    return code, errors.getvalue()


def one_line(done: tuple[int, str], *words: str) -> None:
    code, said = done
    lines = [line for line in said.strip().splitlines() if not line.strip().startswith("loading ")]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("tokentrue serve: "), done
    for word in words:
        assert word in lines[0], lines[0]


@pytest.fixture(autouse=True)
def no_admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENTRUE_ADMIN_KEY", raising=False)


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one_line(serve("--port", str(port)), f"port {port}", "in use", "--port")


def test_engine_unreachable() -> None:
    done = serve("--engine", "sglang", "--url", "http://127.0.0.1:1", "--port", "0", "--model", str(model_dir()))
    one_line(done, "no engine is reachable at http://127.0.0.1:1")


def test_no_such_model(tmp_path: Path) -> None:
    script = write_script(tmp_path, ["x"])
    one_line(
        serve("--engine", "scripted", "--script", str(script), "--port", "0", "--model", str(tmp_path / "nothing")),
        "nothing",
    )


def test_template_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}")
    script = write_script(tmp_path, ["x"])
    flags = ("--engine", "scripted", "--script", str(script), "--port", "0", "--model", str(model_dir()))
    one_line(serve(*flags, "--set", f"model.chat_template={broken}"), "template")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "sglang"), ("--url",)),
        (("--engine", "scripted"), ("--script",)),
        (("--engine", "nonsense"), ("no engine 'nonsense'", "scripted")),
        (("--workers", "2", "--store", "sqlite:here.sqlite"), ("--workers", "sglang")),
        (("--history", "sometimes"), ("model.history", "keep")),
        (("--set", "server.prot=1"), ("server.prot", "unknown key", "port")),
        (("--set", "server.port=high"), ("server.port", "whole number")),
        (("--set", "limits.body_bytes=0"), ("limits.body_bytes", ">= 1")),
        (("--config", "/nowhere.toml"), ("cannot read /nowhere.toml",)),
        (("--store", "postgres:x"), ("sqlite:PATH",)),
    ],
)
def test_wrong_settings(
    arguments: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one_line(serve("--port", "0", *arguments), *words)


@pytest.mark.parametrize("key", ["boss", "aaaaaaaaaaaaaaaaaaaaaaaa"])
def test_a_weak_admin_key_is_refused_beyond_loopback(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TOKENTRUE_ADMIN_KEY", key)
    one_line(serve("--port", "0", "--host", "0.0.0.0"), "TOKENTRUE_ADMIN_KEY", "weak")


def test_an_admin_key_is_made_and_printed_once(tmp_path: Path) -> None:
    """Nobody administers without it: not another process of this machine, not the policy's own shell."""
    server = scripted_server(tmp_path, ["ok"])
    try:
        assert len(server.admin_key) >= 40
        made = server.session()
        assert server.ask("POST", "/sessions", {}, key="none")[0] == 401
        for key in (made.api_key, "none"):
            assert server.ask("POST", f"/sessions/{made.session_id}/reward", {"reward": 1}, key=key)[0] in (401, 403)
    finally:
        assert server.stop() == 0
    assert server.admin_key not in server.log.read_text()


def test_a_template_that_ignores_tools_is_named_at_start_and_at_the_request(tmp_path: Path) -> None:
    template = tmp_path / "no_tools.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    server = scripted_server(tmp_path, ["ok", "ok"], "--set", f"model.chat_template={template}")
    try:
        assert "ignores tools" in server.log.read_text()
        session = server.session()
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        status, answer = server.ask("POST", "/v1/chat/completions", {**body, "tools": TOOLS}, key=session.api_key)
        assert status == 422 and "ignores tools" in answer["error"]["message"]
        assert server.ask("POST", "/v1/chat/completions", body, key=session.api_key)[0] == 200
    finally:
        assert server.stop() == 0


def test_a_gateway_in_front_of_another_process_never_loads_torch(tmp_path: Path) -> None:
    """Also after turns in every dialect, and also where torch is installed: the process has none of its libraries
    mapped."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("needs /proc")
    server = scripted_server(tmp_path, ["<think>\nhm\n</think>\n\nok"] * 3, is_fork=False)
    try:
        session = server.session()
        said = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        for path, body in (
            ("/v1/chat/completions", {**said, "stream": True}),
            ("/v1/messages", {**said, "max_tokens": 50}),
            ("/v1/responses", {"model": "m", "input": "hi"}),
        ):
            assert server.ask("POST", path, body, key=session.api_key)[0] == 200
        server.samples(session.session_id)
        mapped = Path(f"/proc/{server.serving_pid}/maps").read_text()
        assert "tokenizers" in mapped, "the check can see libraries"
        assert "torch" not in mapped
    finally:
        server.stop()


def test_torch_is_hidden_only_while_transformers_is_loaded() -> None:
    program = (
        "import sys\n"
        "from tokentrue.app.libraries import without_torch\n"
        "with without_torch('exact'):\n"
        "    assert 'torch' not in sys.modules, 'an engine of this process needs it'\n"
        "with without_torch('vllm'):\n"
        "    from transformers import AutoTokenizer\n"
        "assert 'torch' not in sys.modules\n"
        "import transformers.utils as t\n"
        "assert not t.is_torch_available()\n"
        "with without_torch('vllm'):\n"
        "    assert 'torch' not in sys.modules, 'too late: nothing is hidden'\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=ROOT)


def test_a_host_that_cannot_be_one() -> None:
    with pytest.raises(ConfigError, match=r"'\.\.' is no host name"):
        listen("..", 0, admin_key="4f9c1b7e2a6d8035")


@pytest.mark.parametrize(
    ("host", "named"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("0.0.0.0", socket.gethostname())]
)
async def test_an_embedded_gateway_says_an_address_that_others_can_use(host: str, named: str) -> None:
    settings = ServeConfig(server=ServerConfig(host=host, port=0, store="memory"))
    async with embedded_gateway(settings) as here, httpx.AsyncClient() as http:
        assert re.fullmatch(rf"http://{re.escape(named)}:\d+", here.base_url)
        assert (await http.get(f"{here.base_url}/health")).status_code == 200
