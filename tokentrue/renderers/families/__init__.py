"""Families of models: what a chat template cannot tell about its model."""

from tokentrue.renderers.families.base import PLAIN, CallForm, Clues, Family
from tokentrue.renderers.families.registry import FAMILIES, family_for

__all__ = ["FAMILIES", "PLAIN", "CallForm", "Clues", "Family", "family_for"]
