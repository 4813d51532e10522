"""An engine's own tokenisation of a text, where it offers the route."""

from __future__ import annotations

from collections.abc import Mapping

from tokentrue.errors import EngineContractError, EngineRejected
from tokentrue.ids import TokenIds
from tokentrue.providers.transport.answers import Tokenized, decode_answer
from tokentrue.providers.transport.http import EngineHttp


async def read_tokens(http: EngineHttp, path: str, body: Mapping[str, object]) -> TokenIds | None:
    """The ids; None where the server has no such route, or another one under its name."""
    try:
        data = await http.read("POST", path, body, retry=False)
        return TokenIds(decode_answer(data, Tokenized, where=http.url + path).tokens)
    except (EngineContractError, EngineRejected):
        return None
