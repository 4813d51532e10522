"""mini-swe-agent, unchanged, on a task of yours: its command line talks to a session of the gateway.

Needs: `pip install mini-swe-agent`, and a gateway with a model of your own.
Run: TOKENTRUE_URL=… TOKENTRUE_ADMIN_KEY=… python examples/mini_swe_agent.py "write the sum of 2 and 2 into sum.txt"
"""

import os
import subprocess
import sys
from pathlib import Path

import tokentrue as tt

task = sys.argv[1] if len(sys.argv) > 1 else "write the sum of 2 and 2 into sum.txt"
QUIET = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

with tt.Client(os.environ["TOKENTRUE_URL"]) as client, client.session(group=task) as session:
    command = [
        Path(sys.executable).with_name("mini"),
        "-m",
        "openai/policy",
        "-t",
        task,
        "-y",
        "--exit-immediately",
        "-l",
        "0",
    ]
    command += ["-c", "mini.yaml", "-c", f"model.model_kwargs.api_base={session.base_url}", "-c", "agent.step_limit=8"]
    subprocess.run(
        command, env={**os.environ, **QUIET, "OPENAI_API_KEY": session.api_key}, check=True, stdin=subprocess.DEVNULL
    )
    written = Path("sum.txt")
    session.reward(float(written.exists() and written.read_text().strip() == "4"))
    samples, coverage = session.samples(), session.coverage()

print(f"reward {samples[0].reward}, {coverage.sampled} tokens sampled, coverage {coverage.ratio:.0%}")
