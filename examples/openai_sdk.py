"""An agent with the OpenAI SDK, streaming, one tool: every token that it samples becomes part of one training sample.

Needs: `pip install openai`, and a gateway (`tokentrue serve`, extra `engine` for the shipped model).
Run: TOKENTRUE_URL=http://127.0.0.1:8000 TOKENTRUE_ADMIN_KEY=… python examples/openai_sdk.py
"""

import os

import tokentrue as tt
from tokentrue.environments.word_problems import CALCULATOR, calculate

with tt.Client(os.environ["TOKENTRUE_URL"]) as client, client.session(group="example", sampling={"seed": 1}) as session:
    openai = session.openai()  # an openai.OpenAI with this session's base URL and key
    messages = [{"role": "user", "content": "Tom has 12 pens. Tom gets 5 more. How many now?"}]
    for _ in range(4):
        with openai.chat.completions.stream(
            model="policy", messages=messages, tools=[CALCULATOR], max_tokens=64
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    session.reward(float("17" in (message.content or "")))
    samples, coverage = session.samples(), session.coverage()

print(message.content)
print(
    f"{len(samples)} sample, {len(samples[0].token_ids)} tokens, {coverage.sampled} sampled, coverage {coverage.ratio:.0%}"
)
