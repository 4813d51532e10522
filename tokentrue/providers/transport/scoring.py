"""Log-probabilities of given tokens from an OpenAI-like completions route, where the engine adds `prompt_logprobs` to it (vLLM).

They are of temperature 1 without filters, whatever the request says, and bypass the engine's prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from tokentrue.errors import EngineContractError
from tokentrue.providers.transport.http import EngineHttp

ROUTE = "/v1/completions"


async def score_prompt(http: EngineHttp, model: str, token_ids: Sequence[int]) -> list[float]:
    """Of `token_ids[1:]`; raises EngineContractError where the answer lacks one of them."""
    body = prompt_scoring_body(token_ids)
    answer: Any = orjson.loads(await http.read("POST", ROUTE, {"model": model, **body}))
    found = prompt_logprobs_in(answer, token_ids)
    if found is None:
        raise EngineContractError(f"{http.url}{ROUTE} returned no log-probability for some of the {len(token_ids)} tokens to score")
    return found


def prompt_scoring_body(token_ids: Sequence[int]) -> dict[str, Any]:
    return {"prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "add_special_tokens": False}


def prompt_logprobs_in(answer: Any, token_ids: Sequence[int]) -> list[float] | None:
    """None unless the answer has a log-probability for each token but the first."""
    choices: Any = answer.get("choices") if isinstance(answer, dict) else None
    rows: Any = choices[0].get("prompt_logprobs") if choices else None
    if not isinstance(rows, list) or len(rows) != len(token_ids):
        return None
    found = [_logprob_in(row, token) for row, token in zip(rows[1:], token_ids[1:], strict=True)]
    return None if any(value is None for value in found) else [value for value in found if value is not None]


def _logprob_in(row: Any, token: int) -> float | None:
    found: Any = row.get(str(token)) if isinstance(row, dict) else None
    value = found.get("logprob") if isinstance(found, dict) else None
    return float(value) if isinstance(value, int | float) else None
