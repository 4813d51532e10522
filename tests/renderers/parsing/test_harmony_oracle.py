"""gpt-oss: OpenAI's own harmony parser is the oracle. Its vocabulary file is written from the real tokenizer, so
nothing is downloaded."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokentrue as tt
from tests import parts
from tests.marks import examples

O200K = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"  # the published file's sha256


@pytest.fixture(scope="module")
def gpt_oss() -> Any:
    return tt.load_renderer(str(parts.tokenizer_dir("gpt-oss")))


@pytest.fixture(scope="module")
def oracle(gpt_oss: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    gpt_oss.parse([])
    pieces = gpt_oss._grammar.pieces
    folder: Path = tmp_path_factory.mktemp("o200k")
    lines = b"".join(base64.b64encode(pieces[id_]) + b" %d\n" % id_ for id_ in range(199998))
    assert hashlib.sha256(lines).hexdigest() == O200K, "our bytes of every token are the published ones"
    (folder / "o200k_base.tiktoken").write_bytes(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def as_oracle_says(oracle: Any, ids: list[int]) -> dict[str, Any]:
    from openai_harmony import Role

    said: dict[str, Any] = {"reasoning": [], "content": [], "calls": []}
    for message in oracle.parse_messages_from_completion_tokens(ids, role=Role.ASSISTANT):
        text = "".join(part.text for part in message.content)
        if message.recipient and message.recipient != "all":
            said["calls"].append((message.recipient.removeprefix("functions."), json.loads(text)))
        elif text.strip(" \t\r\n"):
            said["reasoning" if message.channel == "analysis" else "content"].append(text.strip(" \t\r\n"))
    return said


def as_we_say(message: Any) -> dict[str, Any]:
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())
    ]
    return {"reasoning": message.get("reasoning_content", ""), "content": message["content"] or "", "calls": calls}


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0<"), min_size=1, max_size=20).filter(
    lambda text: bool(text.strip(" \t\r\n"))
)
CALL = st.fixed_dictionaries({"q": WORDS, "n": st.integers(-9, 9)})


@settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    analysis=st.lists(WORDS, max_size=2),
    preamble=st.lists(WORDS, max_size=1),
    call=st.none() | CALL,
    final=WORDS,
    before=st.booleans(),
)
def test_parse_agrees_with_harmony(
    gpt_oss: Any,
    oracle: Any,
    analysis: list[str],
    preamble: list[str],
    call: dict[str, Any] | None,
    final: str,
    before: bool,
) -> None:
    messages = [f"<|channel|>analysis<|message|>{text}" for text in analysis]
    messages += [f"<|channel|>commentary<|message|>{text}" for text in preamble]
    if call is None:
        messages.append(f"<|channel|>final<|message|>{final}")
    elif before and messages:
        messages.append(f" to=functions.look<|channel|>commentary json<|message|>{json.dumps(call)}")
    else:
        messages.append(
            f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{json.dumps(call, ensure_ascii=False)}"
        )
    text = "<|end|><|start|>assistant".join(messages) + ("<|return|>" if call is None else "<|call|>")
    ids = gpt_oss.encode_sampled(text)
    ours, theirs = as_we_say(gpt_oss.parse(ids).message), as_oracle_says(oracle, ids)
    assert ours["calls"] == theirs["calls"]
    assert ours["reasoning"] == "\n".join(theirs["reasoning"])
    assert ours["content"] == "\n".join(theirs["content"])


def test_a_user_continuation_is_harmonys_own(gpt_oss: Any, oracle: Any) -> None:
    from openai_harmony import Message, Role

    prompt = list(gpt_oss.render([{"role": "user", "content": "hi"}]).token_ids)
    ids = [*prompt, *gpt_oss.encode_sampled("<|channel|>final<|message|>yes<|return|>")]
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    extension = gpt_oss.extend(ids, history, [{"role": "user", "content": "and then? é"}])
    theirs = oracle.render(Message.from_role_and_content(Role.USER, "and then? é"))
    assert isinstance(extension, tt.Extension)
    assert list(extension.added_ids) == [*theirs, *oracle.encode("<|start|>assistant", allowed_special="all")]
