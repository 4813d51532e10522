"""slime and Miles:

--custom-generate-function-path slime_generate.generate
--custom-reward-post-process-path tokentrue.integrations.slime.group_rewards
"""

import os

from agent import answer

from tokentrue.integrations.slime import generate_function


async def run_agent(client, sample):
    return await answer(client, sample.prompt, sample.label)


generate = generate_function(run_agent, url=os.environ["TOKENTRUE_URL"])
