"""A model that writes tool calls in a way of its own: a response template in its tokenizer_config.json teaches the
parser.

The stop tokens and the boundaries between turns come out of the chat template; only the grammar of a call is added.
Needs: the extra `gateway`.
Run: python examples/custom_family.py
"""

import json
import shutil
import tempfile
from pathlib import Path

import tokentrue as tt
from tokentrue.environments import SMALL_MODEL

CALLS = {  # <call calculator>{"expression": "2+2"}</call>
    "open_pattern": r"<call (?P<name>[^>\n]+)>", "close": "</call>", "content": "json", "repeats": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}  # fmt: skip
GRAMMAR = {"start_anchor": ["<|im_start|>assistant\n"], "fields": {"content": {}, "tool_calls": CALLS}}

with tempfile.TemporaryDirectory() as folder:
    model = Path(folder) / "my-model"
    shutil.copytree(SMALL_MODEL, model)
    template = (model / "chat_template.jinja").read_text()
    begin, end = template.index("{{- '<tool_call>"), template.index("{%- endfor %}", template.index("{{- '<tool_call>"))
    arguments = "(function.arguments if function.arguments is string else function.arguments | tojson)"
    call = "{{- '<call ' + function.name + '>' + " + arguments + " + '</call>' }}"
    (model / "chat_template.jinja").write_text(template[:begin] + call + template[end:])
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "response_template": GRAMMAR}))

    renderer = tt.load_renderer(model)
    sampled = [*renderer.encode_sampled('<call calculator>{"expression": "2+2"}</call>'), renderer.stop_token_ids[0]]
    parsed = renderer.parse(sampled, prompt_ids=renderer.render([{"role": "user", "content": "2+2?"}]).token_ids)
    print(
        parsed.message["tool_calls"][0]["function"], {role: tt.verify(model).roles[role] for role in ("user", "tool")}
    )
    assert parsed.message["tool_calls"][0]["function"] == {"name": "calculator", "arguments": '{"expression": "2+2"}'}
