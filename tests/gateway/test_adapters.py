"""LoRA adapters as model names: `adapter` or `base:adapter` in any dialect; what is recorded has the adapted model's
bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from tests.marks import slow_but_every  # noqa: E402
from tokentrue.app.background import BackgroundGateway  # noqa: E402
from tokentrue.cli.main import run  # noqa: E402
from tokentrue.environments import SMALL_MODEL  # noqa: E402

ASK = [{"role": "user", "content": "What is 2+2?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the shipped model, as peft saves it."""
    path = tmp_path_factory.mktemp("poet")
    config = json.loads((Path(SMALL_MODEL) / "config.json").read_text())
    size, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(1)
    names = [f"base_model.model.model.layers.{i}.self_attn.q_proj.lora" for i in range(config["num_hidden_layers"])]
    state = {f"{name}_A.weight": torch.randn(4, size, generator=generator) * 0.3 for name in names}
    state |= {f"{name}_B.weight": torch.randn(heads, 4, generator=generator) * 0.3 for name in names}
    save_file(state, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "peft_type": "LORA"}))
    return path


def trained_bits(sample: dict[str, Any], folder: Path | None) -> bool:
    """Whether the recorded log-probabilities are those of a trainer's forward, with the adapter where one is given."""
    from contextlib import nullcontext

    from tokentrue.engine.adapters import attach_adapter, read_adapter
    from tokentrue.engine.weights import load_model
    from tokentrue.numerics import exact, score
    from tokentrue.numerics.exact import STATE

    device = torch.device("cpu")
    model = load_model(SMALL_MODEL, device=device, dtype=torch.float32)
    with torch.no_grad(), exact(model):
        adapter = None if folder is None else read_adapter("poet", folder, None, version=None, device=device)
        with nullcontext() if adapter is None else attach_adapter(model, model.__dict__[STATE].ops, adapter):
            wanted = score(model, torch.tensor([sample["token_ids"]]))[0].tolist()
    recorded = sample["rollout_logprobs"][1:]
    return all(found is None or found == value for found, value in zip(recorded, wanted, strict=True))


def test_an_adapter_is_a_model_name(folder: Path) -> None:
    with (
        BackgroundGateway(engine="exact", adapters={"poet": str(folder)}) as gateway,
        httpx.Client(base_url=gateway.url, timeout=60) as http,
    ):
        admin = {"authorization": f"Bearer {gateway.admin_key}"}

        def sample_of(model: str, path: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
            session = http.post("/sessions", json={"sampling": {"seed": 3}}, headers=admin).json()
            key = {"authorization": f"Bearer {session['api_key']}"}
            body = {"model": model, "messages": ASK, "max_tokens": 12, **more}
            answer = http.post(path, json=body, headers=key)
            assert answer.status_code == 200, answer.text
            return http.get(f"/sessions/{session['session_id']}/samples", headers=admin).json()["samples"][0]

        base, whole, short = sample_of("anything"), sample_of("calculator:poet"), sample_of("poet")
        other = sample_of("poet", "/v1/messages")
        assert whole["token_ids"] == short["token_ids"] and whole["rollout_logprobs"] == short["rollout_logprobs"]
        assert trained_bits(base, None) and trained_bits(whole, folder) and trained_bits(other, folder)
        assert not trained_bits(whole, None), "the adapter changes the distribution"
        session = http.post("/sessions", json={}, headers=admin).json()
        key = {"authorization": f"Bearer {session['api_key']}"}
        refused = http.post("/v1/chat/completions", json={"model": "calculator:pirate", "messages": ASK}, headers=key)
        assert refused.status_code == 400 and "adapter 'pirate' is not loaded; loaded: poet" in refused.text
        models = http.get("/v1/models", headers=key).json()
        assert [model["id"] for model in models["data"]] == ["calculator", "calculator:poet"]


@pytest.mark.parametrize(
    ("file", "content", "words"),
    # One of each file: tests/engine/test_adapters.py has every cause, without a process that serves.
    slow_but_every(
        6,
        [
            ("adapter_config.json", "{nope", "is not JSON"),
            ("adapter_config.json", "[]", "holds a list"),
            ("adapter_config.json", '{"r": 4}', "lora_alpha is missing"),
            ("adapter_config.json", '{"r": 4, "lora_alpha": NaN}', "lora_alpha is nan"),
            (
                "adapter_config.json",
                '{"r": 4, "lora_alpha": 8, "init_lora_weights": "pissa"}',
                "path_initial_model_for_weight_conversion",
            ),
            (
                "adapter_config.json",
                '{"r": 4, "lora_alpha": 8, "alora_invocation_tokens": [5]}',
                "alora_invocation_tokens",
            ),
            ("adapter_model.safetensors", "xx", "is damaged"),
        ],
    ),
)
def test_serve_says_in_one_line_which_file_of_an_adapter_it_refuses(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str, words: str
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(folder, bad)
    (bad / file).write_text(content)
    code = run(
        "serve",
        [
            "--engine",
            "exact",
            "--port",
            "0",
            "--store",
            "memory",
            "--adapter",
            f"good={folder}",
            "--adapter",
            f"bad={bad}",
        ],
    )
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokentrue serve:")]
    assert code == 2 and len(said) == 1
    assert str(bad / file) in said[0] and words in said[0]
