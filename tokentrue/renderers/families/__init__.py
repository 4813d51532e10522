"""Families of models: what a chat template cannot tell about its model."""

from tokentrue.renderers.families.base import PLAIN, Clues, Family
from tokentrue.renderers.families.registry import FAMILIES, family_for

__all__ = ["FAMILIES", "PLAIN", "Clues", "Family", "family_for"]
