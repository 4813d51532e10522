"""What the reader of a page has: a directory with the files and models that pages name, a gateway, and engines at the
usual addresses.

The gateway at http://127.0.0.1:8000 is a real one, with the scripted engine. The engines at 8001, 30000 and so on are a
stand-in that
answers the health checks of SGLang and vLLM: neither runs on the machines of `make test` (`make test-vllm` has the real
vLLM). `codex` and `claude` on the PATH are stand-ins, too: one request, one file. `make test-harness` runs the real
ones.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import tokentrue as tt
from tests.docs.fences import ROOT
from tests.gateway.world import Server
from tokentrue.app.background import BackgroundGateway
from tokentrue.environments import SMALL_MODEL, load_environment
from tokentrue.environments.word_problems import CALCULATOR
from tokentrue.samples import write_samples

KEY = "the-readers-admin-key"
MODELS = ("MODEL", "MODEL_DIR", "DIR", "DIR_OR_ID", "path/to/model", "models/qwen3-8b")
ENGINES = ("127.0.0.1:8001", "127.0.0.1:30000", "127.0.0.1:30001", "a:8000", "b:8000")
# Each asks once, in the way of the agent whose name it has, and writes one file.
AGENT = """import sys
from openai import OpenAI
OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": " ".join(sys.argv[1:])}])
open("answer.txt", "w").write("4")
"""
CODEX = """import os, sys, tomllib
from pathlib import Path
from openai import OpenAI
gateway = tomllib.loads((Path.home() / ".codex" / "config.toml").read_text())["model_providers"]["gateway"]
OpenAI(base_url=gateway["base_url"], api_key=os.environ[gateway["env_key"]]).responses.create(model="any", input=sys.argv[-1])
open("answer.txt", "w").write("4")
"""
CLAUDE = """import sys
from anthropic import Anthropic
Anthropic().messages.create(model="any", max_tokens=64, messages=[{"role": "user", "content": sys.argv[2]}])
open("answer.txt", "w").write("4")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A gateway with two recorded sessions, their samples in a file, a copy of the store, and the engines' address."""

    url: str
    engine: str
    samples: Path
    store: Path
    demo: Path  # what `tokentrue demo` leaves, of one task alone

    def at_real_addresses(self, text: str) -> str:
        for address in ENGINES:
            text = text.replace(f"http://{address}", self.engine)
        return text.replace("http://127.0.0.1:8000", self.url)


class EngineStandIn(BaseHTTPRequestHandler):
    def answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "model"}], "model_path": "model", "is_generation": True, "weight_version": "1"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/tokenize":  # a server without that route is not asked for its tokenizer
            self.send_error(404)
            return
        row = {"token_id": 8, "logprob": -0.5, "top_logprobs": [{"token_id": 8, "logprob": -0.5}]}
        choice = {"token_ids": [8], "logprobs": {"content": [row]}, "finish_reason": "length"}
        self.answer({"choices": [choice], "usage": {"prompt_tokens": 1}})

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def engine_standin() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), EngineStandIn)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def recorded(folder: Path) -> Iterator[Record]:
    store, samples = folder / "gateway.sqlite", folder / "samples.jsonl"
    (folder / "answers.jsonl").write_text('{"text": "It is 17."}\n' * 2000)
    flags = (
        "--engine",
        "scripted",
        "--script",
        str(folder / "answers.jsonl"),
        "--model",
        str(SMALL_MODEL),
        "--store",
        f"sqlite:{store}",
    )
    server = Server(*flags, folder=folder, admin_key=KEY)
    try:
        with engine_standin() as engine, tt.Client(server.url, KEY) as client:
            write_samples([sample for reward in (0.0, 1.0) for sample in recorded_session(client, reward)], samples)
            with sqlite3.connect(store) as live, sqlite3.connect(folder / "copy.sqlite") as copy:
                live.backup(copy)
            live.close()
            copy.close()
            demo = folder / "demo"
            yield Record(
                url=server.url, engine=engine, samples=samples, store=folder / "copy.sqlite", demo=played(demo)
            )
    finally:
        server.stop()


def played(folder: Path) -> Path:
    """Two real rollouts of the shipped model by the exact engine: samples.jsonl and sessions.sqlite."""
    folder.mkdir()
    task = load_environment("calculator").tasks(1)[0]
    samples: list[Any] = []
    with (
        BackgroundGateway(store=f"sqlite:{folder / 'sessions.sqlite'}") as gateway,
        tt.Client(gateway.url, gateway.admin_key) as client,
    ):
        for seed in (1, 2):
            with client.session(group=task.task_id, sampling={"temperature": 1.0, "seed": seed}) as session:
                question = [{"role": "user", "content": task.prompt}]
                session.openai().chat.completions.create(model="any", messages=question, tools=[CALCULATOR])
                session.reward(float(seed - 1))
                samples += session.samples()
    write_samples(samples, folder / "samples.jsonl")
    return folder


def recorded_session(client: tt.Client, reward: float) -> list[Any]:
    with client.session(group="task-7", sampling={"temperature": 1.0}) as session:
        messages: list[Any] = [{"role": "user", "content": "what is 12 plus 5?"}]
        for _ in range(2):
            message = session.openai().chat.completions.create(model="any", messages=messages).choices[0].message
            messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "are you sure?"}]
        session.reward(reward)
        return session.samples()


def furnish(folder: Path, record: Record) -> None:
    """Puts into the reader's directory what pages name."""
    for name in MODELS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(SMALL_MODEL)
    for name in ("benchmarks", "examples", "experiments", "scripts", "compose.yaml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "out" / "demo").mkdir(parents=True)
    shutil.copy(record.samples, folder / "samples.jsonl")
    for made in record.demo.iterdir():
        shutil.copy(made, folder / "out" / "demo")
    for name in ("journal.db", "tokentrue.sqlite"):
        shutil.copy(record.store, folder / name)
    shutil.copy(SMALL_MODEL / "chat_template.jinja", folder / "F.jinja")
    (folder / "answers.jsonl").write_text('{"text": "It is 17."}\n')
    (folder / "tasks.jsonl").write_text('{"prompt": "What is 2 plus 2? Write it into answer.txt."}\n')
    (folder / "grade.py").write_text('print(float(open("answer.txt").read() == "4"))\n')
    shutil.copy(ROOT / "examples" / "custom_environment.py", folder)
    furnish_agents(folder)
    furnish_adapter(folder / "DIR_OF_ADAPTER")


def furnish_adapter(folder: Path) -> None:
    """A LoRA adapter of the shipped model's first layer, as peft writes it, that changes nothing yet."""
    folder.mkdir()
    model = json.loads((SMALL_MODEL / "config.json").read_text())
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {"lora_A": (2, model["hidden_size"]), "lora_B": (model["num_attention_heads"] * model["head_dim"], 2)}
    save_file(
        {f"{module}.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()},
        folder / "adapter_model.safetensors",
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["q_proj"],
        "layers_to_transform": [0],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def furnish_agents(folder: Path) -> None:
    (folder / "my_agent.py").write_text(AGENT)
    task = folder / "harbor-tasks" / "sum"
    for part in ("environment", "tests"):
        (task / part).mkdir(parents=True)
    (task / "task.toml").write_text('version = "1.0"\n')
    (task / "instruction.md").write_text("Write the sum of 2 and 2 into answer.txt.\n")
    (task / "tests" / "test.sh").write_text("grep -c 4 /app/answer.txt > /logs/verifier/reward.txt\n")
    for place in folder, *folder.parents[:2]:
        place.chmod(0o755)  # the sandbox of a run by root is another user
    (folder / "bin").mkdir()
    for name, source in (("codex", CODEX), ("claude", CLAUDE)):
        program = folder / "bin" / name
        program.write_text(f"#!{sys.executable}\n{source}")
        program.chmod(0o755)


def environment(folder: Path, record: Record) -> dict[str, str]:
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    mine = {"PATH": path, "PYTHONPATH": str(ROOT), "TOKENTRUE_URL": record.url, "TOKENTRUE_ADMIN_KEY": KEY, "KEY": KEY}
    return {**os.environ, **mine}
