"""The wire dialects, one file each: foreign JSON in, `Call` and messages out; replies in, that dialect's JSON and events out."""

from tokentrue.gateway.dialects.anthropic import Anthropic
from tokentrue.gateway.dialects.base import Call, Dialect, Encoder, Problem, Seal
from tokentrue.gateway.dialects.openai_chat import OpenAIChat
from tokentrue.gateway.dialects.openai_responses import OpenAIResponses

__all__ = ["Anthropic", "Call", "Dialect", "Encoder", "OpenAIChat", "OpenAIResponses", "Problem", "Seal"]
