"""A cache of encoded texts, keyed by tokenizer and text, which alone decide the ids.

The agents of a group begin with the same system prompt and tools, and read the same files. On and off in one run of
`benchmarks.gateway`: turn 8 3.9 and 5.0 times the bare proxy's time, 64 agents 269 and 123 turns per second. Texts that
nobody has sent before gain nothing. Bounded in bytes, least recently used first out; `model.encode_cache_bytes = 0`
switches it off.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from tokentrue.errors import TokenizerError
from tokentrue.ids import TokenIds

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LIMIT_BYTES = 64 << 20
ENTRY_BYTES = 300  # of an entry's own objects
CHARACTER_BYTES = 4  # the most that Python keeps for one
ID_BYTES = 4


class EncodedTexts:
    """Ids by tokenizer and text. Rendering may run in several threads."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[int, str], TokenIds] = OrderedDict()

    def encode(self, tokenizer: Tokenizer, text: str) -> TokenIds:
        """The ids of a whole text, without tokens that the tokenizer would add around it. `tokenizer` outlives this
        object."""
        key = (id(tokenizer), text)
        with self._lock:
            known = self._entries.get(key)
            if known is not None:
                self._entries.move_to_end(key)
        if known is not None:
            return known
        try:
            ids = TokenIds(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        except TypeError:  # of all strings, only these cannot be passed on as UTF-8
            raise TokenizerError("the text holds a lone surrogate, which no tokenizer can encode") from None
        self._keep(key, ids)
        return ids

    def _keep(self, key: tuple[int, str], ids: TokenIds) -> None:
        size = entry_bytes(key, ids)
        with self._lock:
            if size > self.limit_bytes or key in self._entries:
                return
            while self.used_bytes + size > self.limit_bytes:
                self.used_bytes -= entry_bytes(*self._entries.popitem(last=False))
            self._entries[key] = ids
            self.used_bytes += size


def entry_bytes(key: tuple[int, str], ids: TokenIds) -> int:
    return ENTRY_BYTES + CHARACTER_BYTES * len(key[1]) + ID_BYTES * len(ids)
