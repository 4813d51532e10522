"""An agent edits an answer before it goes on (Search-R1 and ReTool trim theirs). The record keeps what was sampled in a
sample of its own; in the conversation that goes on, the edited turn is given text, which nobody sampled. To train on it
as well, the engine scores it: same weights, no sampling. The tokens that were sampled are scored with it and must have
their recorded log-probabilities, or the engine's weights, temperature or filters are not those of the rollout.

Needs: the extra `engine`.
Run: python examples/rescore_edited_turns.py
"""

import asyncio

import torch

import tokentrue as tt
from tokentrue.environments import SMALL_MODEL
from tokentrue.hub import load_causal_model
from tokentrue.numerics import exact, score

AS_SAMPLED = tt.Sampling(max_tokens=40, temperature=1.0, seed=5)


def find_edited_turn(raw: tt.Sample, edited: tt.Sample, stops: tuple[int, ...]) -> range:
    """Where the conversation that went on has its own version of the last turn of `raw`, with its stop token."""
    start = max(span.start for span in raw.spans if span.kind == "sampled")
    assert edited.token_ids[:start] == raw.token_ids[:start], "both answer the same prompt"
    return range(start, next(at for at in range(start, len(edited.token_ids)) if edited.token_ids[at] in stops) + 1)


async def rescore(provider, sample: tt.Sample, turn: range, *, tolerance: float = 0.0):
    """The mask and the log-probabilities of a row that trains the edited turn, too. `tolerance` is 0 for the exact
    engine; others answer with other rounding (vLLM in bfloat16: about 0.1)."""
    scored = [None, *await provider.score(sample.token_ids)]
    recorded = sample.rollout_logprobs
    for at, value in enumerate(recorded):
        if value is not None and abs(value - scored[at]) > tolerance:
            raise ValueError(f"token {at} was sampled with {value}, and the engine says {scored[at]} now")
    mask = [int(bit or at in turn) for at, bit in enumerate(sample.loss_mask)]
    return mask, [scored[at] if at in turn else value for at, value in enumerate(recorded)]


async def main():
    renderer, provider = tt.load_renderer(SMALL_MODEL), tt.providers.load("exact", model=str(SMALL_MODEL))
    session = tt.Session(renderer=renderer, provider=provider)
    history = [{"role": "user", "content": "What is 12 + 5?"}]
    reply = await session.chat(history, sampling=AS_SAMPLED)
    trimmed = {"role": "assistant", "content": (reply.message.get("content") or "")[:12].strip()}
    history += [trimmed, {"role": "user", "content": "And 3 more?"}]
    await session.chat(history, sampling=AS_SAMPLED)
    await session.reward(1.0)

    raw, edited = session.samples()
    turn = find_edited_turn(raw, edited, renderer.stop_token_ids)
    mask, logprobs = await rescore(provider, edited, turn)
    model = load_causal_model(SMALL_MODEL, dtype="float32")
    with exact(model), torch.no_grad():
        trainer = [None, *score(model, torch.tensor([edited.token_ids]))[0].tolist()]
    trained = [at for at, bit in enumerate(mask) if bit]
    differ = sum(trainer[at] != logprobs[at] for at in trained)
    print(
        f"{sum(raw.loss_mask)} sampled tokens of the raw turn, {len(turn)} of its edited version scored, "
        f"{sum(edited.loss_mask)} sampled after it: {differ} of {len(trained)} differ from the trainer's"
    )


asyncio.run(main())
