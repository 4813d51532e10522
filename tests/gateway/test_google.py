"""Google GenerateContent: what the dialect takes and refuses, what it answers (against the SDK's own models), keys,
seals, streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.inside import Parrot, ask, gateway, new_session, read_conversation
from tests.gateway.test_wire import CASES, parsed, strict, text_of
from tests.gateway.world import TOOLS, call
from tokentrue.errors import InputError, MessageError
from tokentrue.gateway.dialects.base import HttpError, RequestHead
from tokentrue.gateway.dialects.google import Google
from tokentrue.gateway.dialects.signing import ReasoningSigner
from tokentrue.types import Reply, TurnEvent

GOOGLE = Google(ReasoningSigner(b"x"))
SAID = {"role": "user", "parts": [{"text": "hi"}]}
SCHEMA = {
    "type": "OBJECT",
    "properties": {"at": {"type": "STRING", "nullable": True, "maxLength": "9"}},
    "propertyOrdering": ["at"],
}
DECLARED = {"name": "look", "description": "Look.", "parameters": SCHEMA}
LOOK = [{"functionDeclarations": [DECLARED]}]
THOUGHTS = {"thinkingConfig": {"includeThoughts": True}}


def asked(head: dict[str, Any], contents: list[Any]) -> tuple[RequestHead, list[Any]]:
    decoded = GOOGLE.decode(json.dumps({**head, "contents": contents}).encode())
    return decoded.head, list(read_conversation(GOOGLE, decoded))


def part(**fields: Any) -> dict[str, Any]:
    return {"role": "user", "parts": [fields]}


CALL = {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {"at": "x"}}}]}
REFUSED: list[tuple[dict[str, Any], list[Any], str]] = [
    ({"frobnicate": 1}, [SAID], "frobnicate"),
    ({"cachedContent": "cachedContents/1"}, [SAID], "cachedContent"),
    ({"generationConfig": {"frobnicate": 1}}, [SAID], "generationConfig.frobnicate"),
    ({"generationConfig": {"temperature": "hot"}}, [SAID], "generationConfig.temperature"),
    ({"generationConfig": {"topK": 1.5}}, [SAID], "generationConfig.topK"),
    ({"generationConfig": {"candidateCount": 0}}, [SAID], "candidateCount"),
    ({"generationConfig": {"maxOutputTokens": 0}}, [SAID], "max_tokens"),
    ({"generationConfig": {"logprobs": 2}}, [SAID], "generationConfig.logprobs"),
    ({"generationConfig": {"responseModalities": ["AUDIO"]}}, [SAID], "generationConfig.responseModalities"),
    ({"generationConfig": {"responseMimeType": "text/x.enum"}}, [SAID], "generationConfig.responseMimeType"),
    ({"generationConfig": {"responseSchema": SCHEMA}}, [SAID], "generationConfig.responseSchema"),
    ({"generationConfig": {"thinkingConfig": {"x": 1}}}, [SAID], "generationConfig.thinkingConfig.x"),
    ({"system_instruction": "a", "systemInstruction": "b"}, [SAID], "given twice"),
    ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, [SAID], r"systemInstruction.parts\[0\].inlineData"),
    ({"tools": [{"googleSearch": {}}]}, [SAID], r"tools\[0\].googleSearch"),
    ({"tools": [{"functionDeclarations": [{}]}]}, [SAID], r"tools\[0\].functionDeclarations\[0\].name"),
    ({"tools": [{"functionDeclarations": [{**DECLARED, "parametersJsonSchema": {}}]}]}, [SAID], "not both"),
    (
        {"tools": LOOK, "toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}}},
        [SAID],
        "toolConfig.functionCallingConfig.mode",
    ),
    ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, [SAID], "needs tools"),
    (
        {"tools": LOOK, "toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["other"]}}},
        [SAID],
        "allowedFunctionNames",
    ),
    ({}, [], "contents"),
    ({}, ["hi"], r"contents\[0\]"),
    ({}, [{"role": "user"}], r"contents\[0\].parts"),
    ({}, [{"role": "system", "parts": [{"text": "x"}]}], r"contents\[0\].role"),
    ({}, [part(inlineData={"mimeType": "image/png", "data": ""})], r"contents\[0\].parts\[0\].inlineData"),
    ({}, [part(fileData={})], r"contents\[0\].parts\[0\].fileData"),
    ({}, [part(text="a", functionCall={"name": "f"})], r"contents\[0\].parts\[0\]"),
    ({}, [part(functionCall={"name": "f"})], "belongs in a content of the model"),
    (
        {},
        [SAID, CALL, part(functionResponse={"name": "look", "response": {}, "parts": [{}]})],
        r"functionResponse.parts",
    ),
    (
        {},
        [SAID, {"role": "model", "parts": [{"executableCode": {}}]}, SAID],
        r"contents\[1\].parts\[0\].executableCode",
    ),
    ({}, [SAID, {"role": "model", "parts": [{"text": "Sure, "}]}], "prefilled"),
]


@pytest.mark.parametrize(
    ("head", "contents", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_not_supported_is_refused_by_name(head: dict[str, Any], contents: list[Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        asked(head, contents)


def test_every_setting_reaches_the_sampler() -> None:
    config = {
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 40.0,
        "maxOutputTokens": 7,
        "stopSequences": ["END"],
        "seed": 3,
        "candidateCount": 2,
    }
    config |= {"responseLogprobs": True, "logprobs": 4, "presencePenalty": 0.1, "frequencyPenalty": 0.2, **THOUGHTS}
    head, _ = asked({"generationConfig": config, "safetySettings": [], "labels": {}}, [SAID])
    got = head.sampling
    assert (got.temperature, got.top_p, got.top_k, got.max_tokens, got.stop, got.seed) == (0.5, 0.9, 40, 7, ("END",), 3)
    assert (got.top_logprobs, got.presence_penalty, got.frequency_penalty, head.n) == (4, 0.1, 0.2, 2)
    assert head.options.logprobs and head.options.thoughts


def test_snake_case_is_the_same_request() -> None:
    snake = {"system_instruction": {"parts": [{"text": "s"}]}, "generation_config": {"max_output_tokens": 5}}
    snake["tools"] = [{"function_declarations": [DECLARED]}]
    contents = [SAID, {"role": "model", "parts": [{"function_call": {"name": "look", "args": {"some_key": 1}}}]}]
    contents.append(part(function_response={"name": "look", "response": {"some_key": 1}}))
    camel_contents = [SAID, {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {"some_key": 1}}}]}]
    camel_contents.append(part(functionResponse={"name": "look", "response": {"some_key": 1}}))
    camel = {"systemInstruction": {"parts": [{"text": "s"}]}, "generationConfig": {"maxOutputTokens": 5}, "tools": LOOK}
    assert asked(snake, contents) == asked(camel, camel_contents)
    assert asked(snake, contents)[1][-1]["content"] == '{"some_key":1}'  # keys of results are data


def test_schemas_become_json_schema() -> None:
    head, _ = asked({"tools": LOOK}, [SAID])
    assert head.tools is not None
    wanted = {"type": "object", "properties": {"at": {"type": ["string", "null"], "maxLength": 9}}}
    assert head.tools[0]["function"] == {"name": "look", "description": "Look.", "parameters": wanted}
    config = {"responseMimeType": "application/json", "responseSchema": SCHEMA}
    head, _ = asked({"generationConfig": config}, [SAID])
    assert head.sampling.extra["response_format"]["json_schema"]["schema"] == wanted
    head, _ = asked(
        {"tools": LOOK, "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["look"]}}},
        [SAID],
    )
    assert head.sampling.extra["tool_choice"] == "required"
    head, _ = asked({"tools": LOOK, "toolConfig": {"functionCallingConfig": {"mode": "NONE"}}}, [SAID])
    assert head.tools is None


def test_calls_and_results_without_ids_are_paired_in_order() -> None:
    """Also where a client keeps the chunks of a stream as several contents of one turn."""
    calls = [{"functionCall": {"name": name, "args": {"n": n}}} for n, name in enumerate(("f", "g", "f"))]
    split = [{"role": "model", "parts": [one]} for one in calls]
    results = [
        {"functionResponse": {"name": name, "response": {"output": str(n)}}} for n, name in enumerate(("f", "g", "f"))
    ]
    results.append({"functionResponse": {"name": "h", "id": "own", "response": {"error": "no"}}})
    for turn in ([{"role": "model", "parts": calls}], split):
        _, messages = asked({}, [SAID, *turn, {"role": "user", "parts": [*results, {"text": "go on"}]}])
        assert [c["id"] for c in messages[1]["tool_calls"]] == ["f#0", "g#0", "f#1"]
        assert [m.get("tool_call_id") for m in messages[2:]] == ["f#0", "g#0", "f#1", "own", None]
        assert messages[-2] == {"role": "tool", "tool_call_id": "own", "content": "no", "is_error": True}
        assert messages[-1] == {"role": "user", "content": "go on"}


def head_of(**config: Any) -> RequestHead:
    return asked({"generationConfig": config, "tools": LOOK}, [SAID])[0]


def chunks_of(case: str, head: RequestHead) -> list[dict[str, Any]]:
    deltas, done = CASES[case]
    encoder = GOOGLE.encoder(GOOGLE, head, text_of)
    stream = encoder.feed(TurnEvent(node_id="n0"))
    for delta in deltas:
        stream += encoder.feed(TurnEvent(node_id="n0", delta=delta, token_ids=(5,), logprobs=(-0.5,)))
    stream += encoder.feed(TurnEvent(node_id="n0", reply=done)) + encoder.finish()
    return [data for _, data in parsed(stream)]


def by_kind(parts: list[dict[str, Any]]) -> tuple[str, str, list[Any], str]:
    """Thoughts, text, calls and sealed reasoning."""

    thoughts = "".join(p["text"] for p in parts if p.get("thought"))
    text = "".join(p.get("text", "") for p in parts if not p.get("thought"))
    sealed = "".join(
        ReasoningSigner(b"x").unwrap_bytes(p["thoughtSignature"]) or "" for p in parts if "thoughtSignature" in p
    )
    return thoughts, text, [p["functionCall"] for p in parts if "functionCall" in p], sealed


@pytest.mark.parametrize("shown", [False, True], ids=["hidden", "shown"])
@pytest.mark.parametrize("case", CASES)
def test_answers_and_chunks_fit_the_sdk_and_each_other(case: str, shown: bool) -> None:
    from google.genai.types import GenerateContentResponse

    head = head_of(responseLogprobs=True, **({"thinkingConfig": {"includeThoughts": shown}}))
    answer = GOOGLE.build_answer(head, [CASES[case][1]], text_of)
    chunks = chunks_of(case, head)
    for value in (answer, *chunks):
        strict(GenerateContentResponse, value)
        assert value["candidates"][0]["content"][
            "parts"
        ]  # SDKs drop a turn that has a chunk without parts from their history
    whole, last = answer["candidates"][0], chunks[-1]["candidates"][0]
    assert [("finishReason" in chunk["candidates"][0]) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert {k: v for k, v in last.items() if k != "content"} == {k: v for k, v in whole.items() if k != "content"}
    assert chunks[-1]["usageMetadata"] == answer["usageMetadata"]
    streamed = by_kind([one for chunk in chunks for one in chunk["candidates"][0]["content"]["parts"]])
    assert streamed == by_kind(whole["content"]["parts"])
    reasoning = CASES[case][1].message.get("reasoning_content") or ""
    assert streamed[3] == reasoning and streamed[0] == (reasoning if shown else "")
    assert whole["logprobsResult"]["chosenCandidates"][0] == {
        "token": text_of((5,)),
        "tokenId": 5,
        "logProbability": -0.5,
    }


def test_a_changed_thought_is_refused_and_a_kept_signature_brings_the_reasoning_back() -> None:
    reply: Reply = CASES["thinking_and_two_calls"][1]
    parts = GOOGLE.build_answer(head_of(**THOUGHTS), [reply], text_of)["candidates"][0]["content"]["parts"]
    after = part(functionResponse={"name": "look", "response": {}})

    def replay(kept: list[dict[str, Any]]) -> Any:
        return asked({}, [SAID, {"role": "model", "parts": kept}, after])[1][1]

    intact = replay(parts)
    assert (
        intact["reasoning_content"] == "let me look" and intact["content"] == "Both." and len(intact["tool_calls"]) == 2
    )
    assert replay(parts[1:]) == intact  # gemini-cli drops thoughts and keeps signatures
    urlsafe = parts[1]["thoughtSignature"].translate({ord("+"): "-", ord("/"): "_"}).rstrip("=")
    assert replay([{**parts[1], "thoughtSignature": urlsafe}, *parts[2:]]) == intact
    foreign = replay([{**parts[1], "thoughtSignature": "skip_thought_signature_validator"}, *parts[2:]])
    assert "reasoning_content" not in foreign
    with pytest.raises(MessageError, match="thoughtSignature"):
        replay([{**parts[0], "text": "let me lie"}, *parts[1:]])


def test_errors_have_googles_shape() -> None:
    error = GOOGLE.build_error(HttpError(429, "too_many_in_flight", "later", field="f"))["error"]
    assert (error["code"], error["status"], error["message"]) == (429, "RESOURCE_EXHAUSTED", "later")
    assert (error["details"][0]["reason"], error["details"][0]["metadata"]) == ("too_many_in_flight", {"field": "f"})


PATH = "/v1beta/models/some/model-1:generateContent"
BODY = json.dumps({"contents": [SAID]}).encode()


async def test_paths_and_keys() -> None:
    app = gateway()
    session = await new_session(app)
    key = session["api_key"]
    assert session["google_base_url"].endswith(f"/sessions/{session['session_id']}")
    status, answer = await ask(app, "POST", PATH, BODY, key=None, x_goog_api_key=key)
    assert status == 200 and json.loads(answer)["modelVersion"] == "some/model-1"
    assert (await ask(app, "POST", f"{PATH}?key={key}", BODY, key=None))[0] == 200
    assert (await ask(app, "POST", PATH, BODY, key=key))[0] == 200
    assert (await ask(app, "POST", f"/sessions/{session['session_id']}/v1/models/m:generateContent", BODY, key=key))[
        0
    ] == 200
    refused = {
        PATH: 401,
        f"{PATH}?key=tt-x-{'0' * 40}": 401,
        f"/v1/chat/completions?key={key}": 401,  # no other dialect has a key in the URL
    }
    for path, wanted in refused.items():
        assert (await ask(app, "POST", path, BODY, key=None))[0] == wanted, path
    for path in (
        "/v1beta/models/m:embedContent",
        "/v1beta/models",
        "/v1beta/chat/completions",
        "/v1/models/m:batchEmbedContents",
    ):
        status, answer = await ask(app, "POST", path, BODY, key=key)
        assert (status, json.loads(answer)["error"]["status"]) == (404, "NOT_FOUND"), path
    status, answer = await ask(app, "POST", "/v1beta/models/m:streamGenerateContent", BODY, key=key)
    assert status == 400 and "alt=sse" in json.loads(answer)["error"]["message"]
    status, answer = await ask(app, "GET", PATH, key=key)
    assert status == 405
    status, answer = await ask(app, "POST", PATH, b'{"contents": [{"parts": 1}]}', key=key)
    assert json.loads(answer)["error"]["details"][0]["metadata"] == {"field": "contents[0].parts"}
    await app.close()


async def test_several_candidates_and_counts() -> None:
    app = gateway(Parrot("Hello."))
    key = (await new_session(app))["api_key"]
    body = json.dumps({"contents": [SAID], "generationConfig": {"candidateCount": 2}}).encode()
    _, answer = await ask(app, "POST", PATH, body, key=key)
    assert [c["index"] for c in json.loads(answer)["candidates"]] == [0, 1]
    _, stream = await ask(app, "POST", PATH.replace(":generate", ":streamGenerate") + "?alt=sse", body, key=key)
    ends = [data["candidates"][0] for _, data in parsed(stream) if "finishReason" in data["candidates"][0]]
    assert sorted(end["index"] for end in ends) == [0, 1]
    count = json.loads((await ask(app, "POST", PATH.replace("generateContent", "countTokens"), BODY, key=key))[1])[
        "totalTokens"
    ]
    assert count == json.loads((await ask(app, "POST", PATH, BODY, key=key))[1])["usageMetadata"]["promptTokenCount"]
    nested = json.dumps({"generateContentRequest": {"model": "models/m", "contents": [SAID], "tools": LOOK}}).encode()
    assert (
        json.loads((await ask(app, "POST", PATH.replace("generateContent", "countTokens"), nested, key=key))[1])[
            "totalTokens"
        ]
        > count
    )
    await app.close()


async def test_a_turn_goes_on_from_another_dialect() -> None:
    """One session, two dialects: the call that Chat Completions served comes back as a Google content, without its
    id."""
    app = gateway(Parrot("<think>\nhm\n</think>\n\n" + call("look", '{"at": "x"}')))
    session = await new_session(app)
    first = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    assert (await ask(app, "POST", "/v1/chat/completions", json.dumps(first).encode(), key=session["api_key"]))[
        0
    ] == 200
    tools = [
        {
            "functionDeclarations": [
                {**t["function"], "parametersJsonSchema": t["function"]["parameters"]} for t in TOOLS
            ]
        }
    ]
    for declared in tools[0]["functionDeclarations"]:
        declared.pop("parameters")
    result = part(functionResponse={"name": "look", "response": {"output": "a shelf"}})
    body = {"contents": [SAID, CALL, result], "tools": tools}
    assert (await ask(app, "POST", PATH, json.dumps(body).encode(), key=session["api_key"]))[0] == 200
    known = app.services.sessions.get_loaded(session["session_id"])
    assert known is not None
    nodes = known.session.tree.in_order()
    assert nodes[1].parent == nodes[0].id and known.coverage().ratio == 1.0
    await app.close()
