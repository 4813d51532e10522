"""The embedded engines through the gateway: what they cannot enforce is refused in plain words, in the client's
dialect."""

from __future__ import annotations

import json

import pytest

from tests.gateway.inside import Parrot, ask, gateway, new_session
from tokentrue.types import Completion, Ids, Sampling


class Unmasked(Parrot):
    """Refuses what the exact and the hf engine refuse, by their own check."""

    name = "exact"

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        from tokentrue.providers.building import refuse_constraints

        refuse_constraints(self.name, sampling.extra)
        return await super().generate(prompt_ids, sampling, session=session)


async def test_response_format_is_refused_in_plain_words() -> None:
    app = gateway(Unmasked())
    session = await new_session(app)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_object"}}
    status, answer = await ask(app, "POST", "/v1/chat/completions", json.dumps(body).encode(), key=session["api_key"])
    message = json.loads(answer)["error"]["message"]
    assert status == 400 and "response_format" in message and "cannot force" in message and "extra" not in message
    await app.close()


@pytest.mark.parametrize("name", ["exact", "hf"])
async def test_the_engines_check_it_before_they_sample(name: str) -> None:
    pytest.importorskip("torch")
    from tokentrue import providers
    from tokentrue.environments import SMALL_MODEL
    from tokentrue.errors import SamplingError

    engine = providers.load(name, model=str(SMALL_MODEL))
    try:
        with pytest.raises(SamplingError, match="response_format: engine"):
            await engine.generate((1, 2), Sampling(extra={"response_format": {"type": "json_object"}}))
    finally:
        await engine.close()


@pytest.mark.parametrize("name", ["exact", "hf"])
def test_stop_strings_end_a_turn(name: str) -> None:
    """Whole and streamed, the turn ends where the stop string is complete."""
    pytest.importorskip("torch")
    import httpx

    from tokentrue.app.background import BackgroundGateway

    with BackgroundGateway(engine=name) as gateway, httpx.Client(base_url=gateway.url, timeout=60) as http:
        admin = {"authorization": f"Bearer {gateway.admin_key}"}
        session = http.post("/sessions", json={}, headers=admin).json()
        keys = {"authorization": f"Bearer {session['api_key']}"}
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "What is 3 + 4?"}],
            "max_tokens": 24,
            "temperature": 0,
        }
        free = http.post("/v1/chat/completions", json=body, headers=keys).json()
        message = free["choices"][0]["message"]
        text = message["content"] or message["tool_calls"][0]["function"]["arguments"]
        stop = text[1:3]
        stopped = http.post("/v1/chat/completions", json={**body, "stop": [stop]}, headers=keys)
        assert stopped.status_code == 200, stopped.text
        streamed = http.post("/v1/chat/completions", json={**body, "stop": [stop], "stream": True}, headers=keys)
        assert streamed.status_code == 200 and streamed.text.rstrip().endswith("[DONE]"), streamed.text
        nodes = http.get(f"/sessions/{session['session_id']}", headers=admin).json()["nodes"]
        assert nodes[1]["sampled_tokens"] == nodes[2]["sampled_tokens"] < nodes[0]["sampled_tokens"]
