"""Google GenerateContent: `generateContent`, `streamGenerateContent` and `countTokens`."""

from tokentrue.gateway.dialects.google.requests import CountTokensBody, GenerateBody, Google

__all__ = ["CountTokensBody", "GenerateBody", "Google"]
