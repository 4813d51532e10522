"""A request's messages, parsed once, with their matching keys."""

from tokentrue.conversation.reading import (
    ByteBudget,
    Conversation,
    ConversationMessage,
    Conversations,
    ParsedConversation,
    own_source,
    shorten_source,
)

__all__ = [
    "ByteBudget",
    "Conversation",
    "ConversationMessage",
    "Conversations",
    "ParsedConversation",
    "own_source",
    "shorten_source",
]
