"""OpenAI Responses: the second request names the first by `previous_response_id`, and the recorded tokens are extended.

Run: TOKENTRUE_URL=http://127.0.0.1:8000 TOKENTRUE_ADMIN_KEY=… python examples/responses.py
"""

import os

import tokentrue as tt

with tt.Client(os.environ["TOKENTRUE_URL"]) as client, client.session(group="example", sampling={"seed": 1}) as session:
    openai = session.openai()
    first = openai.responses.create(
        model="policy", input="Tom has 12 pens. Tom gets 5 more. How many now?", max_output_tokens=64
    )
    second = openai.responses.create(
        model="policy", input="and plus 3?", previous_response_id=first.id, max_output_tokens=64
    )
    (sample,) = session.samples()  # both turns in one sequence
    coverage = session.coverage()

turns = {span.turn for span in sample.spans if span.kind == "sampled"}
print(f"{len(turns)} turns in one sample, {coverage.sampled} tokens sampled, coverage {coverage.ratio:.0%}")
print(second.output_text)
