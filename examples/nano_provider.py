"""A small engine of your own as a provider: ids in, ids and log-probabilities out, with a cache of keys and values.

Needs: the extra `engine`.
Run: python examples/nano_provider.py
"""

import asyncio

import torch

import tokentrue as tt
from tokentrue.environments import SMALL_MODEL
from tokentrue.errors import SamplingError
from tokentrue.hub import load_causal_model
from tokentrue.ids import TokenIds
from tokentrue.protocols import Streaming
from tokentrue.providers.building import CompletionBuilder, refuse_unknown_extra


class NanoEngine(Streaming):
    name, truthful_filters = "nano", frozenset[str]()
    model = load_causal_model(SMALL_MODEL, dtype="float32").eval()

    async def stream(self, prompt_ids, sampling, *, session=None, whole=False):
        refuse_unknown_extra(self.name, sampling, frozenset())
        if sampling.filters or sampling.stop or sampling.top_logprobs:  # ignored, they would make the record untrue
            raise SamplingError("engine 'nano' has no filters, stop strings or top_logprobs; leave them out")
        builder = CompletionBuilder(self.name, TokenIds(prompt_ids))
        new, cache, finish = list(prompt_ids), None, "length"
        noise = torch.Generator().manual_seed(sampling.seed or 0)
        while finish == "length" and len(builder.ids) < (sampling.max_tokens or 64):
            with torch.no_grad():
                out = self.model(torch.tensor([new]), past_key_values=cache, use_cache=True)
            logprobs = torch.log_softmax(out.logits[0, -1] / (sampling.temperature or 1.0), -1)
            drawn = torch.multinomial(logprobs.exp(), 1, generator=noise) if sampling.temperature else logprobs.argmax()
            new, cache = [int(drawn)], out.past_key_values
            yield builder.add(new, [float(logprobs[new[0]])], version=0)
            finish = "stop" if new[0] in sampling.stop_token_ids else "length"
        ended = new[0] if finish == "stop" else None
        yield tt.types.Chunk(final=builder.complete(finish, prompt_tokens=len(prompt_ids), stopped_by=ended))

    async def health(self):
        return {"engine": self.name, "version": 0}


async def main():
    nano, renderer = NanoEngine(), tt.load_renderer(SMALL_MODEL)
    session, question = tt.Session(renderer=renderer, provider=nano), [{"role": "user", "content": "What is 12 + 5?"}]
    await session.chat(question, sampling=tt.Sampling(max_tokens=60, seed=1))
    hf = tt.providers.load("hf", model=str(SMALL_MODEL))
    found = await tt.check_logprobs_close(nano, hf, renderer.render(question).token_ids)
    assert found.close, found.verdict
    print(f"{found.verdict}; coverage {session.coverage().ratio:.0%} of {session.coverage().sampled} sampled tokens")


asyncio.run(main())
