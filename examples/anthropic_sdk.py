"""The Anthropic SDK against the same gateway: Messages, streamed, with a tool; thinking blocks may be sent back or
dropped.

Needs: `pip install anthropic`, and a gateway (`tokentrue serve`, extra `engine` for the shipped model).
Run: TOKENTRUE_URL=http://127.0.0.1:8000 TOKENTRUE_ADMIN_KEY=… python examples/anthropic_sdk.py
"""

import json
import os

import tokentrue as tt
from tokentrue.environments.word_problems import CALCULATOR, calculate

function = CALCULATOR["function"]
TOOL = {"name": function["name"], "description": function["description"], "input_schema": function["parameters"]}

with tt.Client(os.environ["TOKENTRUE_URL"]) as client, client.session(group="example", sampling={"seed": 1}) as session:
    anthropic = session.anthropic()  # an anthropic.Anthropic with this session's base URL and key
    messages = [{"role": "user", "content": "Tom has 12 pens. Tom gets 5 more. How many now?"}]
    for _ in range(4):
        with anthropic.messages.stream(model="policy", messages=messages, tools=[TOOL], max_tokens=64) as stream:
            reply = stream.get_final_message()
        messages.append(
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]}
        )
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            break
        results = [calculate(json.dumps(call.input)) for call in calls]
        blocks = zip(calls, results, strict=True)
        content = [{"type": "tool_result", "tool_use_id": call.id, "content": result} for call, result in blocks]
        messages.append({"role": "user", "content": content})
    coverage = session.coverage()

print(messages[-1]["content"][-1].get("text"))
print(f"{len(messages)} messages, {coverage.sampled} tokens sampled, coverage {coverage.ratio:.0%}")
