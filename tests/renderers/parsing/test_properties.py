"""Sampled tokens are never canonical: whatever the ids, nothing is lost, streaming equals parsing, and parsing inverts
rendering."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import tokentrue as tt
from tests import parts
from tests.contract.subjects import OWN, Subject
from tests.contract.suite import TOOLS, assert_same
from tests.marks import examples
from tests.renderers.parsing.test_parsing import add_up, as_streamed
from tokentrue.renderers.codec import shield
from tokentrue.types import Ended, Status

NAMES = [subject.name for subject in OWN]
SUBJECTS = {subject.name: subject for subject in OWN}
RELAXED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


@cache
def renderer(name: str) -> Any:
    return SUBJECTS[name].renderer()


@cache
def markers(name: str) -> list[int]:
    return sorted(renderer(name).codec.texts)


def token_ids(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids at all: markers as often as text, bytes that are no UTF-8, stop tokens in the middle."""
    size = renderer(name).codec.backend.get_vocab_size()
    return st.lists(
        st.one_of(st.sampled_from(markers(name)), st.integers(0, size - 1), st.integers(1, 256)), max_size=60
    )


@st.composite
def chunked(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    edges = [0, *cuts, len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


def check_any_ids(name: str, data: st.DataObject, ids: list[int]) -> None:
    r = renderer(name)
    prompt = data.draw(st.sampled_from([(), tuple(r.render([{"role": "user", "content": "hi"}]).token_ids)]))
    whole = r.parse(ids, prompt_ids=prompt, tools=TOOLS)
    at_once = r.parser(prompt_ids=prompt, tools=TOOLS)
    at_once.feed(ids)
    parser = r.parser(prompt_ids=prompt, tools=TOOLS)
    deltas = [delta for chunk in data.draw(chunked(ids)) for delta in parser.feed(chunk)]
    rest, streamed = parser.finish()
    assert streamed == at_once.finish()[1], "the chunks made a difference"
    assert add_up(deltas + rest) == as_streamed(streamed.message)
    assert_streamed_is_whole(streamed, whole)
    _nothing_lost(r, ids, whole)


def assert_streamed_is_whole(streamed: Any, whole: Any) -> None:
    """All is the same, but for calls that broke off after a stream had begun to show them: a stream keeps them as
    calls, which are no JSON, and a whole answer has their text instead."""
    assert streamed.attempts == whole.attempts
    assert (streamed.raw, streamed.ended, streamed.stop_id) == (whole.raw, whole.ended, whole.stop_id)
    calls = streamed.message.get("tool_calls", [])
    if sum(attempt.status in (Status.OK, Status.UNKNOWN_TOOL) for attempt in whole.attempts) == len(calls):
        assert streamed == whole
        return
    good = [call["function"] for call in calls if is_json(call["function"]["arguments"])]
    assert good == [call["function"] for call in whole.message.get("tool_calls", [])]
    malformed = [attempt for attempt in whole.attempts if attempt.status not in (Status.OK, Status.UNKNOWN_TOOL)]
    assert 0 < len(calls) - len(good) <= len(malformed)
    text = iter(whole.message["content"] or "")
    assert all(character in text for character in (streamed.message["content"] or "").strip()), (
        "text that the whole answer does not have"
    )
    assert streamed.message.get("reasoning_content") == whole.message.get("reasoning_content")


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _nothing_lost(r: Any, ids: list[int], whole: Any) -> None:
    pieces = r._grammar.pieces
    assert whole.raw.encode("utf-8", "surrogateescape") == pieces.join(ids)
    assert (whole.ended is Ended.STOP) == bool(ids and ids[-1] in r.stop_token_ids)
    for attempt in whole.attempts:
        assert 0 <= attempt.start <= attempt.end <= len(ids)
        assert attempt.raw in whole.raw
        assert attempt.raw.encode("utf-8", "surrogateescape") in pieces.join(ids[attempt.start : attempt.end])
    json.dumps(whole.message).encode("utf-8")
    for call in whole.message.get("tool_calls", ()):
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(150), **RELAXED)  # type: ignore[arg-type]
@given(data=st.data())
def test_any_ids(name: str, data: st.DataObject) -> None:
    check_any_ids(name, data, data.draw(token_ids(name)))


PIECES = [
    '{"name": "search", "arguments": {"query": "x", "count": 3}}', '{"name": "search", "arguments": {"query": "é 中',
    '"}}', "}", '{"query": "x"', '{"arguments": {"query": "x"}, "name": "search"}', '{"query": tru}', '{"query": NaN}',
    '{"name": "search", "arguments": {}, "name": "b"}',
    "functions.search:0", "search", " to=functions.search", "json", "commentary", "analysis", "final", "assistant", "```json\n", "function",
    "<arg_key>query</arg_key><arg_value>3</arg_value>", "<arg_key>count</arg_key>", "<arg_value>3", "</arg_value>", "\n", " ", "text",
    '<invoke name="search">', '<parameter name="query">', "x < y", "</parameter>", "</invoke>", '<parameter name="count">7</parameter>',
    "<function=search>", "<parameter=query>", "</function>", "<tool_call>", "</think>", "\ufdd0",
]  # fmt: skip


@st.composite
def call_like(draw: st.DrawFn, name: str) -> list[int]:
    """Markers, and what stands between them in calls, in any order: mostly calls that break off somewhere."""
    parts_of_it = st.one_of(
        st.sampled_from(PIECES).map(renderer(name).encode_sampled),
        st.sampled_from(markers(name)).map(lambda id_: [id_]),
    )
    return [id_ for piece in draw(st.lists(parts_of_it, max_size=24)) for id_ in piece]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(90), **RELAXED)  # type: ignore[arg-type]
@given(data=st.data())
def test_anything_like_a_call(name: str, data: st.DataObject) -> None:
    check_any_ids(name, data, data.draw(call_like(name)))


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0\ufdd1\ufdd2"), max_size=24)


@st.composite
def messages(draw: st.DrawFn, subject: Subject) -> dict[str, Any]:
    text = draw(st.one_of(st.just(""), WORDS.map(str.strip)))
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if subject.dialect.think is not None:
        message["reasoning_content"] = draw(WORDS.map(str.strip))
    count = draw(st.integers(0, 2 if subject.dialect.parallel else 1))
    if count:
        message["tool_calls"] = [
            {
                "id": subject.dialect.ids("search", 0, place),
                "type": "function",
                "function": {
                    "name": "search",
                    "arguments": json.dumps(draw(arguments(subject)), ensure_ascii=draw(st.booleans())),
                },
            }
            for place in range(count)
        ]
        if not subject.dialect.text_with_calls:
            message["content"] = ""
    return message


def arguments(subject: Subject) -> st.SearchStrategy[dict[str, Any]]:
    """In XML-like formats a value's outer line breaks are layout, so those formats get values without them."""
    plain = WORDS.map(str.strip).filter(lambda text: "<" not in text)
    return st.fixed_dictionaries({}, optional={"count": st.integers(-(10**9), 10**9), "query": plain})


def resplit(draw: Any, r: Any, ids: list[int]) -> list[int]:
    """The same bytes from other tokens: some are taken apart into smaller ones, as sampling does."""
    pieces, single = r._grammar.pieces, _single_bytes(r)
    result: list[int] = []
    for id_ in ids:
        whole = pieces[id_]
        if id_ not in r.codec.texts and len(whole) > 1 and draw(st.booleans()):
            result += [single[byte] for byte in whole]
        else:
            result.append(id_)
    return result


def _single_bytes(r: Any) -> dict[int, int]:
    if not hasattr(r, "_test_bytes"):
        plain = [id_ for id_ in range(r.codec.backend.get_vocab_size()) if id_ not in r.codec.texts]
        r._test_bytes = {piece[0]: id_ for id_ in plain if len(piece := r._grammar.pieces[id_]) == 1}
    return r._test_bytes


def check_inverts(name: str, data: st.DataObject) -> None:
    subject, r = SUBJECTS[name], renderer(name)
    message = data.draw(messages(subject))
    assume(shield(r.codec, message).shielded is message)  # text that reads as a marker is written as one here
    history = [{"role": "user", "content": "Go."}]
    prompt = r.render(history, tools=TOOLS).token_ids
    r.parse([], prompt_ids=prompt)
    text = subject.dialect.write(message, prompt=subject.judge().decode(prompt[-24:]))
    ids = resplit(data.draw, r, r.encode_sampled(text))
    parsed = r.parse(ids, prompt_ids=prompt, tools=TOOLS)
    assert parsed.raw == text
    assert_same(parsed.message, message)
    new = [{"role": "user", "content": "Next."}]
    extension = r.extend([*prompt, *ids], [*history, dict(parsed.message)], new, TOOLS)
    assert isinstance(extension, tt.Extension)
    assert list(extension.token_ids[: len(prompt) + len(ids)]) == [*prompt, *ids], "a sampled token changed"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(90), **RELAXED)  # type: ignore[arg-type]
@given(data=st.data())
def test_parsing_inverts_what_a_model_writes(name: str, data: st.DataObject) -> None:
    check_inverts(name, data)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=1250, **RELAXED)  # type: ignore[arg-type]
@given(data=st.data())
def test_many(name: str, data: st.DataObject) -> None:
    """Ten thousand of each over the eight formats."""
    check_any_ids(name, data, data.draw(token_ids(name)))
    check_any_ids(name, data, data.draw(call_like(name)))
    check_inverts(name, data)


def test_the_scanner_agrees_with_transformers_own() -> None:
    """Our subclass replaces hooks of `ResponseParser`; on well-formed turns the parent must give the same message."""
    from transformers.utils.chat_parsing import parse_response

    for name in ("qwen3-like", "glm-like", "kimi-like", "minimax-like", "deepseek-like"):
        subject = next(one for one in OWN if one.tokenizer == f"own:{name}")
        r = subject.renderer()
        prompt = "".join(r.decode(r.render([{"role": "user", "content": "Go."}]).token_ids))
        message = {
            "content": "Look.", "reasoning_content": "Hm.",
            "tool_calls": [{"function": {"name": "search", "arguments": '{"query": "x", "count": 3}'}}],
        }  # fmt: skip
        text = subject.dialect.write(message, prompt=prompt)
        body = text.removesuffix(subject.dialect.call_stop or subject.dialect.stop)
        theirs = parse_response(body, dict(r.family.response_template), prefix=prompt, tools=TOOLS)
        ours = r.parse(r.encode_sampled(text), prompt_ids=r.encode_sampled(prompt), tools=TOOLS).message
        assert theirs["reasoning_content"] == ours["reasoning_content"]
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in theirs["tool_calls"]] == [
            (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in ours["tool_calls"]
        ]


def test_parts_are_ours() -> None:
    assert set(parts.own_names()) >= {
        "qwen3-like",
        "k2v3-like",
        "glm-like",
        "kimi-like",
        "minimax-like",
        "deepseek-like",
        "harmony-like",
    }
