"""Can the chat template of a model be extended without rendering history again? Proven or refused, role by role, in
token ids.

Needs: the extra `gateway`.
Run: python examples/verify_model.py [MODEL_DIR_OR_HUB_ID]
"""

import sys

import tokentrue as tt
from tokentrue.environments import SMALL_MODEL

found = tt.verify(sys.argv[1] if len(sys.argv) > 1 else SMALL_MODEL)
for role, result in found.roles.items():
    print(f"{role:>10}  {result:<8}  {found.why.get(role, '')}")

renderer = tt.load_renderer(sys.argv[1] if len(sys.argv) > 1 else SMALL_MODEL)
history = [{"role": "user", "content": "2+2?"}]
prompt = renderer.render(history).token_ids
sampled = [*renderer.encode_sampled("It is 4."), renderer.stop_token_ids[0]]  # in a run: what the engine sampled
added = renderer.extend([*prompt, *sampled], messages=[*history, {"role": "assistant", "content": "It is 4."}],
                        new=[{"role": "user", "content": "+1?"}])  # fmt: skip
assert isinstance(added, tt.Extension) and list(added.token_ids[: len(prompt) + len(sampled)]) == [*prompt, *sampled]
print(f"recorded {len(prompt) + len(sampled)} ids, appended {len(added.added_ids)}, nothing rendered again")
