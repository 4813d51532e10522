"""Run by the Python that has xgrammar (vLLM's grammar engine): what a structural tag, read from stdin, lets a model
write."""

import json
import sys
from typing import Any

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
TEXTS = [
    CALL,
    f"<think>\nhm\n</think>\n\n{CALL}",
    f"{CALL}\n{CALL}",
    "just text",
    '<tool_call>\n{"name": "other"',
    '<tool_call>\n{"name": "look", "arguments": {"at": 3',
]
STOP = 256


def verdict(xgrammar: Any, grammar: Any, text: str) -> str:
    matcher = xgrammar.GrammarMatcher(grammar)
    if not matcher.accept_string(text):
        return "refused"
    mask = xgrammar.allocate_token_bitmask(1, STOP + 1)
    matcher.fill_next_token_bitmask(mask)
    return "may end" if mask[0][STOP // 32].item() >> (STOP % 32) & 1 else "goes on"


if __name__ == "__main__":
    import xgrammar  # type: ignore[import-not-found]

    vocabulary = [bytes([byte]) for byte in range(STOP)] + [b"<stop>"]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[STOP])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(xgrammar.Grammar.from_structural_tag(sys.stdin.read()))
    print(json.dumps({text: verdict(xgrammar, compiled, text) for text in TEXTS}))
