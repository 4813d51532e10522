"""An engine without weights: every token is drawn from the tokens of the prompt, as often as they occur there."""

import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from tokentrue.errors import SamplingError
from tokentrue.ids import TokenIds
from tokentrue.protocols import Streaming
from tokentrue.providers.building import CompletionBuilder, refuse_constraints, refuse_unknown_extra
from tokentrue.types import Chunk, Finish, Ids, Sampling


class BagOfTokens(Streaming):
    """`serve` gives every engine that runs in its process the model's path and a function from ids to text."""

    name = "bag"
    truthful_filters = frozenset[str]()

    def __init__(self, model: str, *, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        self.model = model

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        self.refuse(sampling)
        counts = Counter(prompt_ids)
        # Temperature: p ∝ count^(1/T); greedy (T = 0) takes the most frequent and reports T = 1.
        weights = {token: count ** (1 / (sampling.temperature or 1.0)) for token, count in counts.items()}
        total = sum(weights.values())
        draw = random.Random(sampling.seed)
        builder = CompletionBuilder(self.name, TokenIds(prompt_ids))
        finish, stopped_by = Finish.LENGTH, None
        for _ in range(sampling.max_tokens or 64):
            if sampling.temperature == 0:
                token = max(weights, key=lambda each: (weights[each], -each))
            else:
                (token,) = draw.choices(list(weights), weights=list(weights.values()))
            yield builder.add([token], [math.log(weights[token] / total)], version=0)
            if token in sampling.stop_token_ids:
                finish, stopped_by = Finish.STOP, token
                break
        yield Chunk(final=builder.complete(finish, prompt_tokens=len(prompt_ids), stopped_by=stopped_by))

    def refuse(self, sampling: Sampling) -> None:
        """What it cannot do is refused: a setting that is silently ignored would make the record untrue."""
        refuse_constraints(self.name, sampling.extra)
        refuse_unknown_extra(self.name, sampling, frozenset())
        if sampling.filters or sampling.stop or sampling.top_logprobs:
            raise SamplingError("engine 'bag' has no filters, stop strings or top_logprobs; leave them out")

    async def health(self) -> Mapping[str, Any]:
        return {"engine": self.name, "model": self.model, "version": 0}

    async def close(self) -> None:
        pass
