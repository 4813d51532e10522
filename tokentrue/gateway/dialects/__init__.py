"""Wire dialects: parse foreign JSON to `RequestHead` and messages; build replies and events in that dialect."""

from tokentrue.gateway.dialects.anthropic import Anthropic
from tokentrue.gateway.dialects.base import DecodedBody, Dialect, HttpError, RequestHead
from tokentrue.gateway.dialects.google import Google
from tokentrue.gateway.dialects.openai_chat import OpenAIChat, OpenAIChatTokens
from tokentrue.gateway.dialects.openai_responses import OpenAIResponses
from tokentrue.gateway.dialects.signing import ReasoningSigner

__all__ = [
    "Anthropic",
    "DecodedBody",
    "Dialect",
    "Google",
    "HttpError",
    "OpenAIChat",
    "OpenAIChatTokens",
    "OpenAIResponses",
    "ReasoningSigner",
    "RequestHead",
]
