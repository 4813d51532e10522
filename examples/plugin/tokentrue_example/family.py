"""Models that write a call as `<call NAME>{"argument": …}</call>`, recognised by their template, never by a name."""

from tokentrue.renderers.families import Clues, Family
from tokentrue.renderers.families.base import CHATML, NAMED, response

CALLS = {
    "tool_calls": {
        "open_pattern": r"<call (?P<name>[^>\n]+)>", "close": "</call>", "content": "json", "repeats": True, "transform": NAMED,
    },
}  # fmt: skip


def recognise(clues: Clues) -> Family | None:
    return Family(name="tagged", response_template=response(CALLS, anchors=CHATML)) if clues.has("<call ") else None
