"""Ids in, ids out on the OpenAI route, called as verifiers calls Prime's inference server: through the OpenAI SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.gateway.world import TOOLS, Made, Server, call, renderer, scripted_server

ANSWERS = [f"answer {index}" for index in range(40)]
OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = scripted_server(tmp_path_factory.mktemp("tokens"), [call("look", '{"at": "shelf"}'), *ANSWERS])
    yield made
    made.stop()


def complete(session: Made, **body: Any) -> ChatCompletion:
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        return client.post("/chat/completions/tokens", body={"model": "policy", **body}, cast_to=ChatCompletion)


def odd_ids(text: str) -> list[int]:
    """Ids that no tokenizer would write: one per byte."""
    return [token for byte in text.encode() for token in renderer().encode_sampled(chr(byte))]


def test_the_engine_gets_the_ids_and_turns_continue_by_ids(server: Server) -> None:
    session = server.session()
    prompt = [
        *renderer().render(OPENING, TOOLS).token_ids[:-3],
        *odd_ids("odd ids"),
        *renderer().render(OPENING, TOOLS).token_ids[-3:],
    ]
    first = complete(session, messages=OPENING, tools=TOOLS, tokens=prompt, logprobs=True)
    (choice,) = first.choices
    assert first.prompt_token_ids == prompt  # type: ignore[attr-defined]
    assert choice.message.tool_calls and choice.message.tool_calls[0].function.name == "look", "parsed with the tools"
    sampled = choice.token_ids  # type: ignore[attr-defined]
    assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == len(sampled)
    # Another message than was served, and ids of the caller's own: only the ids decide.
    more = [*OPENING, {"role": "assistant", "content": "(cut)"}, {"role": "user", "content": "And?"}]
    longer = [*prompt, *sampled, *odd_ids("between")]
    second = complete(session, messages=more, tools=TOOLS, tokens=longer)
    other = complete(session, messages=OPENING, tools=TOOLS, tokens=[*prompt[:-1], prompt[-1] + 1])
    answer = server.samples(session.session_id)
    samples = {tuple(sample["token_ids"]): sample for sample in answer["samples"]}
    whole = [*longer, *second.choices[0].token_ids]  # type: ignore[attr-defined]
    assert set(samples) == {
        tuple(whole),
        (*prompt[:-1], prompt[-1] + 1, *other.choices[0].token_ids),  # type: ignore[attr-defined]
    }
    mask = samples[tuple(whole)]["loss_mask"]
    assert mask == [0] * len(prompt) + [1] * len(sampled) + [0] * len(odd_ids("between")) + [1] * (
        len(whole) - len(longer)
    )
    nodes = server.ask("GET", f"/sessions/{session.session_id}")[1]["nodes"]
    assert [(node["why"], node["projection"]) for node in nodes] == [
        ("first", "token_ids"),
        (None, "token_ids"),
        ("new_conversation", "token_ids"),
    ]
    assert answer["coverage"]["ratio"] == 1.0


def test_the_chat_route_continues_what_the_tokens_route_began(server: Server) -> None:
    session = server.session()
    prompt = [*renderer().render(OPENING).token_ids]
    first = complete(session, messages=OPENING, tokens=prompt)
    with openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        history: Any = [
            *OPENING,
            first.choices[0].message.model_dump(exclude_none=True),
            {"role": "user", "content": "?"},
        ]
        client.chat.completions.create(model="policy", messages=history)
    (sample,) = server.samples(session.session_id)["samples"]
    assert sample["token_ids"][: len(prompt)] == prompt


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([], "tokens"),
        (None, "tokens"),
        ([-1], "tokens"),
        ([2**31], "tokens"),
        (["1"], "tokens"),
        ([10**6], "vocabulary"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(server: Server, tokens: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        complete(server.session(), messages=OPENING, **({} if tokens is None else {"tokens": tokens}))


def test_messages_must_reach_beyond_what_the_ids_repeat(server: Server) -> None:
    session = server.session()
    prompt = [*renderer().render(OPENING).token_ids]
    first = complete(session, messages=OPENING, tokens=prompt)
    longer = [*prompt, *first.choices[0].token_ids, 1, 2]  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="a recorded conversation of 3 messages"):
        complete(session, messages=OPENING, tokens=longer)
    with pytest.raises(openai.BadRequestError, match="pinned"):
        complete(server.session(pin=["system"]), messages=OPENING, tokens=prompt)


def test_it_streams(server: Server, tmp_path: Path) -> None:
    session = server.session()
    prompt = [*renderer().render(OPENING).token_ids]
    status, text = server.ask(
        "POST",
        f"/sessions/{session.session_id}/v1/chat/completions/tokens",
        {"messages": OPENING, "tokens": prompt, "stream": True},
        key=session.api_key,
    )
    assert status == 200 and '"token_ids":[' in text and text.rstrip().endswith("data: [DONE]")
