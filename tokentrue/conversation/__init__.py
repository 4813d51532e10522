"""A request's messages, parsed once, with their matching keys."""

from tokentrue.conversation.reading import ByteBudget, Conversation, ConversationMessage, Conversations, own_source

__all__ = ["ByteBudget", "Conversation", "ConversationMessage", "Conversations", "own_source"]
