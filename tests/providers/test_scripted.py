from __future__ import annotations

import json
import math
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
    file = script(
        tmp_path / "s.jsonl",
        {"text": "hi"},
        {"token_ids": [1, 2], "logprobs": [-0.5, -0.25], "finish_reason": "length"},
    )
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
        ('{"text": "a", "tokens": []}', "unknown field `tokens`"),
        ("{}", "either text or token_ids"),
        ("[1]", "Expected `object`, got `array`"),
        ("{oops", "not JSON"),
        ('{"text": "a", "finish_reason": "tired"}', "finish_reason"),
        ('{"text": "a", "finish_reason": ["stop"]}', "finish_reason"),
        ('{"text": 5}', "got `int` - at `.*text"),
        ('{"text": null}', "got `null` - at `.*text"),
        ('{"token_ids": 5}', "got `int` - at `.*token_ids"),
        ('{"token_ids": "abc"}', "got `str` - at `.*token_ids"),
        ('{"token_ids": [true]}', r"got `bool` - at `.*token_ids\[0\]"),
        ('{"token_ids": [7, -1]}', "token id -1 at 1 is not"),
        ('{"token_ids": [1.5]}', r"got `float` - at `.*token_ids\[0\]"),
        ('{"token_ids": [4, 5], "logprobs": [-1.0]}', "2 token ids .*, 1 logprobs"),
        ('{"text": "ab", "logprobs": [-1.0, -1.0]}', "3 token ids .*, 2 logprobs"),
        ('{"token_ids": [4], "logprobs": null}', "got `null` - at `.*logprobs"),
        ('{"token_ids": [4, 5], "logprobs": [-1.0, null]}', r"got `null` - at `.*logprobs\[1\]"),
        ('{"token_ids": [4], "logprobs": ["x"]}', r"got `str` - at `.*logprobs\[0\]"),
        ('{"token_ids": [4], "logprobs": [0.5]}', r"logprobs\[0\] must be"),
        ('{"token_ids": [4], "logprobs": [-9999]}', r"logprobs\[0\] must be"),
        ('{"text": "a", "delay_s": "a"}', "got `str` - at `.*delay_s"),
        ('{"text": "a", "delay_s": -1}', ">= 0.0 - at `.*delay_s"),
        ('{"text": "a", "delay_s": null}', "got `null` - at `.*delay_s"),
        ('{"text": "a", "status": "500"}', "got `str` - at `.*status"),
        ('{"status": true}', "got `bool` - at `.*status"),
    ],
)
def test_bad_scripts_name_the_line(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text('{"token_ids": [1]}\n' + line)
    with pytest.raises(FileFormatError, match=r"s\.jsonl:2.*" + words):
        tt.providers.load("scripted", script=file, encode=encode, stop_id=0)


def test_bad_turns_name_their_place() -> None:
    turns = [{"token_ids": [1]}, {"text": "lone \ud800"}]
    with pytest.raises(FileFormatError, match="turn 1: text holds a lone surrogate"):
        tt.providers.load("scripted", script=turns, encode=encode)
    with pytest.raises(FileFormatError, match=r"turn 0: logprobs\[0\] must be a log-probability, got nan"):
        tt.providers.load("scripted", script=[{"token_ids": [1], "logprobs": [math.nan]}])


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="encode="):
        tt.providers.load("scripted", script=[{"text": "hi"}])


def test_unknown_engine_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="exact, hf, sglang, vllm, scripted"):
        tt.providers.load("tgi")


def test_unknown_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="speed"):
        tt.providers.load("scripted", script=[], speed=2)
