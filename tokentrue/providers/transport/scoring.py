"""Log-probabilities of given tokens from an OpenAI-like completions route, where the engine adds `prompt_logprobs` to
it (vLLM).

They are of temperature 1 without filters, whatever the request says, and bypass the engine's prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokentrue.errors import EngineContractError
from tokentrue.providers.transport.answers import VLLMScores, decode_answer
from tokentrue.providers.transport.http import EngineHttp

ROUTE = "/v1/completions"


async def score_prompt(http: EngineHttp, model: str, token_ids: Sequence[int]) -> list[float]:
    """Of `token_ids[1:]`; raises EngineContractError where the answer lacks one of them."""
    where = f"{http.url}{ROUTE}"
    asked = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "add_special_tokens": False}
    data = await http.read("POST", ROUTE, {"model": model, "prompt": list(token_ids), **asked})
    found = scores_of(decode_answer(data, VLLMScores, where=where), token_ids)
    if found is None:
        raise EngineContractError(
            f"{where} returned no log-probability for some of the {len(token_ids)} tokens to score"
        )
    return found


def scores_of(answer: VLLMScores, token_ids: Sequence[int]) -> list[float] | None:
    rows = answer.choices[0].prompt_logprobs if answer.choices else None
    if rows is None or len(rows) != len(token_ids):
        return None
    found = [row.get(str(token)) if row else None for row, token in zip(rows[1:], token_ids[1:], strict=True)]
    values = [scored.logprob for scored in found if scored is not None and scored.logprob is not None]
    return values if len(values) == len(found) else None
