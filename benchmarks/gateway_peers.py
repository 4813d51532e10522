"""Other gateways as targets of `python -m benchmarks.agents --peer NAME=PYTHON`, each run by the Python of an
environment that has it installed.

| name | package | what it does with the engine |
|---|---|---|
| `rllm` | rllm-model-gateway 0.1.0 | chat; asks the engine for ids, keeps traces in SQLite |
| `openenv` | openenv 0.10.0 | chat; asks the engine for ids, links them to a graph, buffers streams |
| `litellm` | litellm[proxy] 1.106.2 | chat; records no tokens: cost alone |
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.conversations import PATH
from benchmarks.servers import ServerProcess
from tokentrue.errors import ConfigError

START_S = 120.0


def rllm(engine: str, port: str, folder: Path) -> list[str]:
    database = str(folder / "rllm.sqlite")
    return [
        "rllm_model_gateway",
        "--port",
        port,
        "--worker",
        f"{engine}/v1",
        "--store",
        "sqlite",
        "--db-path",
        database,
    ]


def openenv(engine: str, port: str, folder: Path) -> list[str]:
    module = "openenv.core.harness.capture.server"
    flags = ["--llm-url", f"{engine}/v1", "--model", "m", "--engine", "vllm", "--capture-level", "tokens"]
    return [module, *flags, "--port", port, "--allow-unregistered"]


def litellm(engine: str, port: str, folder: Path) -> list[str]:
    parameters = f"{{model: openai/m, api_base: '{engine}/v1', api_key: none}}"
    config = folder / "litellm.yaml"
    config.write_text(f"model_list:\n  - model_name: m\n    litellm_params: {parameters}\n")
    return ["litellm.proxy.proxy_cli", "--config", str(config), "--port", port, "--num_workers", "1"]


PEERS: Mapping[str, Callable[[str, str, Path], list[str]]] = {"rllm": rllm, "openenv": openenv, "litellm": litellm}


class PeerProcess(ServerProcess):
    """A peer's server; it is ready when its port takes connections and answers."""

    def __init__(self, name: str, python: str, engine: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self._name, self.admin_key = name, ""
        log = folder / f"{name}.log"
        with log.open("wb") as out:
            command = [python, "-m", *PEERS[name](engine, str(self.port), folder)]
            env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
        end = time.monotonic() + START_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise ConfigError(f"{name} did not start: {log.read_text()[-400:]}")
            time.sleep(0.2)

    def new_path(self) -> str:
        """rllm records where the address names a session, the others in any case."""
        return f"/sessions/{secrets.token_hex(8)}{PATH}" if self._name == "rllm" else PATH

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True
