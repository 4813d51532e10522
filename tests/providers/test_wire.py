"""Prompt ids as growing JSON: what is kept for a session, and that it goes when it is told to."""

from __future__ import annotations

import json
from array import array

import pytest

from tokentrue.providers.sglang import SGLangProvider
from tokentrue.providers.vllm import VLLMProvider
from tokentrue.providers.wire import PARTS, IdsJson, OncePerSampling
from tokentrue.types import JoinedIds, Sampling


def test_the_text_grows_with_the_prompt_and_is_forgotten_with_the_session() -> None:
    ids = IdsJson()
    for prompt in ([1, 2, 3], [1, 2, 3, 40, 5], [1, 2, 9]):
        assert json.loads(b"[" + b"".join(ids.dump(array("i", prompt), "s")) + b"]") == prompt
    assert len(ids._kept) == 1 and ids._bytes > 0
    ids.forget("s")
    ids.forget("never seen")
    assert not ids._kept and ids._bytes == 0


def test_what_was_written_is_not_written_again() -> None:
    ids, prompt = IdsJson(), array("i", [1])
    before: tuple[bytes, ...] = ()
    for turn in range(5 * PARTS):
        parts = ids.dump(prompt, "s")
        assert json.loads(b"[" + b"".join(parts) + b"]") == prompt.tolist()
        assert len(parts) <= 2 * PARTS + 1
        assert len(parts) == 2 or parts[: len(before)] == before  # made one, or grown by a part
        assert all(a is b for a, b in zip(parts, before, strict=False)) or len(parts) == 2
        before = parts
        if turn % 2:
            prompt.extend((turn, -turn))  # the same array, grown
        else:
            prompt = prompt + array("i", [turn, 7])  # another one that begins alike
    assert ids._bytes == len(b"".join(before)) + 4 * ids._kept["s"].length
    assert b"".join(ids.dump(prompt[:2], "s")) == b"1,0"  # not a continuation
    assert b"".join(ids.dump(array("i"), "s")) == b"" and b"".join(ids.dump([5], "s")) == b"5"


def test_an_array_that_was_grown_meanwhile_is_compared_as_it_was() -> None:
    ids, first = IdsJson(), array("i", [1, 2])
    ids.dump(first, "s")
    first.append(3)
    assert b"".join(ids.dump(array("i", [1, 2, 4]), "s")) == b"1,2,4"


def test_what_was_foreseen_is_sent_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a session does it: the recorded ids are told while nobody waits, and the next prompt begins with that very array."""
    ids, recorded = IdsJson(), array("i", [1, 2, 3])
    ids.dump(recorded, "s")
    for turn in range(3 * PARTS):
        recorded = recorded + array("i", [turn, 7])  # what was sampled
        ids.foresee(recorded, "s")
        told = ids._kept["s"].parts
        assert len(told) <= PARTS + 1
        with monkeypatch.context() as patch:
            patch.setattr(JoinedIds, "whole", property(lambda _: pytest.fail("nothing old is looked at or copied again")))
            parts = ids.dump(JoinedIds(recorded, array("i", [-turn])), "s")
        assert all(a is b for a, b in zip(parts, told, strict=False)) and len(parts) == len(told) + 1
        recorded = recorded + array("i", [-turn])
        assert json.loads(b"[" + b"".join(parts) + b"]") == recorded.tolist()
    ids.foresee(array("i", [1, 2, 4]), "s")  # another branch: left for when it is asked for
    ids.foresee(array("i", [1, 2, 3]), "nobody's")
    assert b"".join(ids._kept["s"].parts) == b"".join(parts) and list(ids._kept) == ["s"]
    assert ids._bytes == ids._kept["s"].size


def test_joined_ids_that_begin_otherwise_are_written_anew() -> None:
    ids = IdsJson()
    ids.dump(JoinedIds(array("i", [1, 2]), array("i", [3])), "s")
    assert b"".join(ids.dump(JoinedIds(array("i", [1, 2]), array("i", [4])), "s")) == b"1,2,4"
    assert b"".join(ids.dump(JoinedIds(array("i", [1, 2, 4]), array("i", [5])), "s")) == b"1,2,4,5"
    assert b"".join(ids.dump(JoinedIds(array("i", [1, 9, 4, 5]), array("i", [6])), "s")) == b"1,9,4,5,6"


def test_the_oldest_sessions_make_room() -> None:
    ids = IdsJson(max_sessions=2)
    for session in "abca":
        ids.dump([1, 2], session)
    assert list(ids._kept) == ["c", "a"] and ids._bytes == sum(kept.size for kept in ids._kept.values())


def test_a_sampling_is_written_once() -> None:
    written: list[Sampling] = []
    once = OncePerSampling(lambda sampling: written.append(sampling) or str(sampling.seed).encode(), kept=2, longest=5)
    first, second, long = Sampling(seed=1), Sampling(seed=1), Sampling(seed=1234567)
    for sampling in (first, first, second, first, long, long):
        assert once(sampling) == str(sampling.seed).encode()
    assert written == [first, second, long, long]
    for seed in range(20):  # objects that come and go at the same address are not taken for each other
        assert once(Sampling(seed=seed)) == str(seed).encode()


async def test_adapters_forget_sessions() -> None:
    for kind in (SGLangProvider, VLLMProvider):
        provider = kind("http://127.0.0.1:1")
        provider._ids.dump([1, 2], "s")
        provider.forget("s")
        assert not provider._ids._kept
        await provider.close()
