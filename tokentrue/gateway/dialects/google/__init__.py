"""Google GenerateContent: `generateContent`, `streamGenerateContent` and `countTokens`."""

from tokentrue.gateway.dialects.google.requests import Google

__all__ = ["Google"]
