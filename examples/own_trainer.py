"""The exact engine in a training loop of your own: sample, score, check that all bits agree, update, publish.

Needs: the extra `engine`.
Run: python examples/own_trainer.py
"""

import asyncio

import torch
from transformers import AutoModelForCausalLM

import tokentrue as tt
from tokentrue.engine import ExactEngine
from tokentrue.environments import SMALL_MODEL
from tokentrue.environments.word_problems import CALCULATOR
from tokentrue.numerics import exact, score

model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
renderer = tt.load_renderer(SMALL_MODEL)
question = {"role": "user", "content": "Tom has 12 pens. 5 others turn up. How many now?"}
prompt = renderer.render([question], tools=[CALCULATOR]).token_ids


def reward(completion: tt.Completion) -> float:
    """1 if the model calls the calculator with the right operation."""
    message = renderer.parse(completion.token_ids, prompt_ids=prompt, tools=[CALCULATOR]).message
    return float(any("12 + 5" in call["function"]["arguments"] for call in message.get("tool_calls", ())))


async def main() -> None:
    with ExactEngine(SMALL_MODEL, version=0) as engine:
        for step in range(2):
            group = await engine.generate_n(prompt, tt.Sampling(max_tokens=48, seed=step), 8)
            rewards = torch.tensor([reward(completion) for completion in group])
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
                f"step {step}: reward {rewards.mean():.2f}, {sum(len(each.token_ids) for each in group)} tokens, 0 differ, "
                f"weights {engine.version} published"
            )


asyncio.run(main())
