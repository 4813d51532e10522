"""What every part of a turn works on: the request's messages, read once, with their keys."""

from tokentrue.conversation.reading import ByteBudget, Conversation, ConversationMessage, Conversations, own_source

__all__ = ["ByteBudget", "Conversation", "ConversationMessage", "Conversations", "own_source"]
