"""OpenAI Responses: the second request names the first by `previous_response_id`, and the recorded tokens are extended.

Needs: `pip install openai`, and a gateway (`tokentrue serve`, extra `engine` for the shipped model).
Run: TOKENTRUE_URL=http://127.0.0.1:8000 TOKENTRUE_ADMIN_KEY=… python examples/responses.py
"""

import os

import tokentrue as tt
from tokentrue.environments import word_problems

TOOL = {"type": "function", **word_problems.CALCULATOR["function"]}

with tt.Client(os.environ["TOKENTRUE_URL"]) as client, client.session(group="example", sampling={"seed": 1}) as session:
    openai = session.openai()
    question = "Tom has 12 pens. Tom gets 5 more. How many now?"
    first = openai.responses.create(model="policy", input=question, tools=[TOOL])
    call = next(item for item in first.output if item.type == "function_call")
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": word_problems.calculate(call.arguments),
    }
    second = openai.responses.create(model="policy", input=[result], tools=[TOOL], previous_response_id=first.id)
    (sample,) = session.samples()  # both turns in one sequence
    coverage = session.coverage()

turns = {span.turn for span in sample.spans if span.kind == "sampled"}
print(f"{len(turns)} turns in one sample, {coverage.sampled} tokens sampled, coverage {coverage.ratio:.0%}")
print(second.output_text)
