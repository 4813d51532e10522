"""Model families: what a chat template does not say about its model."""

from tokentrue.renderers.families.base import PLAIN, CallForm, Clues, Family
from tokentrue.renderers.families.registry import FAMILIES, family_for

__all__ = ["FAMILIES", "PLAIN", "CallForm", "Clues", "Family", "family_for"]
