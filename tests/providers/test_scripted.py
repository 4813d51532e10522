from __future__ import annotations

import json
from pathlib import Path

import pytest

import tokentrue as tt
from tokentrue.errors import ConfigError, EngineRejected, EngineTimeout, FileFormatError
from tokentrue.types import Finish, Sampling


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def script(path: Path, *turns: object) -> Path:
    path.write_text("\n".join(json.dumps(turn) for turn in turns))
    return path


async def test_answers_in_order_with_the_models_stop_token(tmp_path: Path) -> None:
    file = script(tmp_path / "s.jsonl", {"text": "hi"}, {"token_ids": [1, 2], "logprobs": [-0.5, -0.25], "finish_reason": "length"})
    provider = tt.providers.load("scripted", script=file, encode=encode, stop_id=0)
    first = await provider.generate([9], Sampling())
    second = await provider.generate([9, 9], Sampling())
    assert first.token_ids == (104, 105, 0)
    assert first.stopped_by == 0
    assert second.token_ids == (1, 2)
    assert second.logprobs == (-0.5, -0.25)
    assert (second.finish, second.prompt_tokens) == (Finish.LENGTH, 2)
    with pytest.raises(EngineRejected, match="exhausted after 2"):
        await provider.generate([9], Sampling())


async def test_streams_token_by_token() -> None:
    provider = tt.providers.load("scripted", script=[{"token_ids": [4, 5, 6]}])
    chunks = [chunk async for chunk in provider.stream([1], Sampling())]
    assert [chunk.token_ids for chunk in chunks[:-1]] == [(4,), (5,), (6,)]
    assert chunks[-1].final is not None and chunks[-1].final.token_ids == (4, 5, 6)


async def test_scripted_failures() -> None:
    provider = tt.providers.load("scripted", script=[{"status": 500}, {"status": 504}, {"token_ids": [1]}])
    with pytest.raises(EngineRejected):
        await provider.generate([1], Sampling())
    with pytest.raises(EngineTimeout):
        await provider.generate([1], Sampling())
    assert (await provider.generate([1], Sampling(max_tokens=5))).token_ids == (1,)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a", "tokens": []}', "unknown key 'tokens'"),
        ("{}", "either text or token_ids"),
        ("[1]", "a turn is an object"),
        ("{oops", "not JSON"),
        ('{"text": "a", "finish_reason": "tired"}', "finish_reason"),
    ],
)
def test_bad_scripts_name_the_line(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text('{"token_ids": [1]}\n' + line)
    with pytest.raises(FileFormatError, match=r"s\.jsonl:2.*" + words):
        tt.providers.load("scripted", script=file, encode=encode)


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="encode="):
        tt.providers.load("scripted", script=[{"text": "hi"}])


def test_unknown_engine_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="sglang, vllm, hf"):
        tt.providers.load("tgi")


def test_unknown_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="speed"):
        tt.providers.load("scripted", script=[], speed=2)
