"""An agent edits an answer before it goes on; the engine scores the edited turn, so that it can be trained, too. What
was sampled is scored with it and must have its recorded log-probabilities, or the weights are not those of the rollout.

Needs: the extra `engine`.
Run: python examples/rescore_edited_turns.py
"""

import asyncio

import torch

import tokentrue as tt
from tokentrue.environments import SMALL_MODEL
from tokentrue.hub import load_causal_model
from tokentrue.numerics import exact, score


def find_edited_turn(raw: tt.Sample, edited: tt.Sample, stops: tuple[int, ...]) -> range:
    """Where the conversation that went on has its own version of the last turn of `raw`, with its stop token."""
    start = max(span.start for span in raw.spans if span.kind == "sampled")
    assert edited.token_ids[:start] == raw.token_ids[:start], "both answer the same prompt"
    return range(start, next(at for at in range(start, len(edited.token_ids)) if edited.token_ids[at] in stops) + 1)


async def rescore(provider, sample: tt.Sample, turn: range, *, tolerance: float = 0.0):
    """Mask and log-probabilities of the row. Other engines than `exact` need a tolerance (vLLM in bfloat16: 0.1)."""
    scored, recorded = [None, *await provider.score(sample.token_ids)], sample.rollout_logprobs
    for at, value in enumerate(recorded):
        if value is not None and not abs(value - scored[at]) <= tolerance:
            raise ValueError(f"token {at} was sampled with {value}, and the engine says {scored[at]} now")
    mask = [int(bit or at in turn) for at, bit in enumerate(sample.loss_mask)]
    return mask, [scored[at] if at in turn else value for at, value in enumerate(recorded)]


async def main():
    renderer, provider = tt.load_renderer(SMALL_MODEL), tt.providers.load("exact", model=str(SMALL_MODEL))
    session, sampling = tt.Session(renderer=renderer, provider=provider), tt.Sampling(max_tokens=40, seed=5)
    history = [{"role": "user", "content": "What is 12 + 5?"}]
    reply = await session.chat(history, sampling=sampling)
    trimmed = {"role": "assistant", "content": (reply.message.get("content") or "")[:12].strip()}
    history += [trimmed, {"role": "user", "content": "And 3 more?"}]
    await session.chat(history, sampling=sampling)
    await session.reward(1.0)

    raw, edited = session.samples()
    turn = find_edited_turn(raw, edited, renderer.stop_token_ids)
    mask, logprobs = await rescore(provider, edited, turn)
    model = load_causal_model(SMALL_MODEL, dtype="float32")
    with exact(model), torch.no_grad():
        trainer = [None, *score(model, torch.tensor([edited.token_ids]))[0].tolist()]
    differ = sum(trainer[at] != logprobs[at] for at, bit in enumerate(mask) if bit)
    said = f"{sum(raw.loss_mask)} sampled tokens of the raw turn, {len(turn)} of its edited version scored, "
    print(f"{said}{sum(edited.loss_mask)} sampled after it: {differ} of {sum(mask)} differ from the trainer's")


asyncio.run(main())
