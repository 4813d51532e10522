"""Sizes that one session may reach; each is a setting."""

from __future__ import annotations

from dataclasses import dataclass

from tokentrue.errors import InputError, LimitExceeded
from tokentrue.types import MAX_CHOICES


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """None means no limit. `max_tokens` counts recorded tokens (given and sampled), `max_in_flight` turns being
    generated, `max_new_chars`
    the characters of one request that are not recorded yet: a text takes about a hundred times its size while it is
    encoded. `conversation_bytes` are those of the last requests' conversations that are kept to read the next one; 0
    keeps none."""

    max_nodes: int | None = 10_000
    max_tokens: int | None = 20_000_000
    max_prompt_tokens: int | None = None
    max_new_chars: int | None = 8_000_000
    max_in_flight: int | None = 256
    max_n: int = MAX_CHOICES
    conversation_bytes: int = 32 << 20

    def check_turn(self, *, n: int, nodes: int, tokens: int, in_flight: int) -> None:
        """Before anything is generated."""
        if not 1 <= n <= self.max_n:
            raise InputError(f"n must be between 1 and {self.max_n}, got {n}")
        if self.max_nodes is not None and nodes + n > self.max_nodes:
            raise LimitExceeded(f"session limit max_nodes={self.max_nodes} reached; end the session or raise the limit")
        if self.max_in_flight is not None and in_flight >= self.max_in_flight:
            limit = f"max_in_flight={self.max_in_flight}"
            raise LimitExceeded(f"session limit {limit} reached; try again, or raise the limit", retry_after_s=1.0)
        if self.max_tokens is not None and tokens >= self.max_tokens:
            raise LimitExceeded(
                f"session limit max_tokens={self.max_tokens} reached; end the session or raise the limit"
            )

    def check_text(self, chars: int) -> None:
        """Before it is rendered."""
        if self.max_new_chars is not None and chars > self.max_new_chars:
            limit = f"max_new_chars={self.max_new_chars}"
            raise LimitExceeded(
                f"the request has {chars} new characters, the limit is {limit}; shorten them or raise it"
            )

    def check_prompt(self, length: int) -> None:
        if self.max_prompt_tokens is not None and length > self.max_prompt_tokens:
            limit = f"max_prompt_tokens={self.max_prompt_tokens}"
            raise LimitExceeded(f"the prompt has {length} tokens, the limit is {limit}; shorten the conversation")
