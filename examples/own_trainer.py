"""The exact engine in a training loop of your own: sample, score, check that all bits agree, update, publish.

Run: python examples/own_trainer.py
"""

import asyncio

import torch
from transformers import AutoModelForCausalLM

import tokentrue as tt
from tokentrue.engine import ExactEngine
from tokentrue.environments import SMALL_MODEL
from tokentrue.numerics import exact, score

model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
prompt = tt.load_renderer(SMALL_MODEL).render([{"role": "user", "content": "what is 12 plus 5?"}]).token_ids


async def main() -> None:
    with ExactEngine(SMALL_MODEL, version=0) as engine:
        for step in range(2):
            group = await engine.generate_n(prompt, tt.Sampling(max_tokens=24, seed=step), 4)
            rewards = torch.tensor([float(len(completion.token_ids)) for completion in group])  # put your reward here
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            optimizer.zero_grad()
            with exact(model):
                for completion, advantage in zip(group, advantages, strict=True):
                    logprobs = score(model, torch.tensor([[*prompt, *completion.token_ids]]))[0, len(prompt) - 1 :]
                    assert logprobs.tolist() == list(completion.logprobs), "rollout and trainer differ"
                    (-advantage * logprobs.mean() / len(group)).backward()
            optimizer.step()
            engine.load_weights(model.state_dict(), version=step + 1)
            print(
                f"step {step}: {sum(len(each.token_ids) for each in group)} tokens, 0 differ, weights {engine.version} published"
            )


asyncio.run(main())
