"""Answers that no engine should give: what is not the shape of `/generate`."""

from __future__ import annotations

from typing import Any

STOP = {"type": "stop"}


def one_token(*, token: Any = 1, logprob: Any = -1.0, count: Any = 1, **meta: Any) -> dict[str, Any]:
    """An answer of one token with something wrong in it."""
    told = {
        "completion_tokens": count,
        "output_token_logprobs": [[logprob, token, None]],
        "finish_reason": STOP,
        **meta,
    }
    return {"output_ids": [token], "meta_info": {name: value for name, value in told.items() if value != "left out"}}


SHAPELESS: dict[str, Any] = {
    "error_text": {"error": "out of memory"},
    "error_object": {"error": {"message": "out of memory"}},
    "empty": {},
    "list": [],
    "text": "ok",
    "null": None,
    "meta_null": {"output_ids": [1], "meta_info": None},
    "meta_list": {"output_ids": [1], "meta_info": []},
    "no_logprobs": one_token(output_token_logprobs="left out"),
    "count_text": one_token(count="1"),
}
MALFORMED: dict[str, Any] = {
    **SHAPELESS,
    "rows_numbers": one_token(output_token_logprobs=[1]),
    "logprob_null": one_token(logprob=None),
    "logprob_text": one_token(logprob="-1"),
    "id_text": one_token(token="1"),
    "id_negative": one_token(token=-1),
    "id_beyond": one_token(token=10**7),
    "id_huge": one_token(token=2**40),
    "finish_number": one_token(finish_reason=3),
    "finish_unknown": one_token(finish_reason={"type": "eaten"}),
    "finish_missing": one_token(finish_reason="left out"),
}
