"""Prompt ids as growing JSON: what is kept for a session, and that it goes when it is told to."""

from __future__ import annotations

import json
from array import array

from tokentrue.providers.sglang import SGLangProvider
from tokentrue.providers.vllm import VLLMProvider
from tokentrue.providers.wire import IdsJson


def test_the_text_grows_with_the_prompt_and_is_forgotten_with_the_session() -> None:
    ids = IdsJson()
    for prompt in ([1, 2, 3], [1, 2, 3, 40, 5], [1, 2, 9]):
        assert json.loads(b"[" + b"".join(ids.dump(array("i", prompt), "s")) + b"]") == prompt
    assert len(ids._kept) == 1 and ids._bytes > 0
    ids.forget("s")
    ids.forget("never seen")
    assert not ids._kept and ids._bytes == 0


async def test_adapters_forget_sessions() -> None:
    for kind in (SGLangProvider, VLLMProvider):
        provider = kind("http://127.0.0.1:1")
        provider._ids.dump([1, 2], "s")
        provider.forget("s")
        assert not provider._ids._kept
        await provider.close()
