"""transformers' template sandbox, with short cuts to what it would answer anyway. Nothing is allowed that it forbids.

Where a template spends its time is the sandbox's attribute access: it asks the object, catches an error, then asks for an item; it looks at
every value it hands out. For plain JSON values, loop counters, namespaces and the methods of strings the answer is known beforehand.
"""

from __future__ import annotations

from typing import Any, cast

from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_OF_DICT = frozenset(dir(dict))
_OF_STR = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}  # those two are wrapped
_COUNTERS = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0"})
_PLAIN = frozenset({bool, int, float, str, list, dict, type(None)})


class Quick(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _OF_DICT:  # no attribute of any dict: the sandbox would go on to its item
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif kind is str:
            if attribute in _OF_STR:
                return getattr(obj, attribute)
        elif kind is LoopContext:
            if attribute in _COUNTERS:
                return getattr(obj, attribute)
        elif isinstance(obj, Namespace) and not attribute.startswith("_"):
            try:
                value = getattr(obj, attribute)
            except AttributeError:
                return super().getattr(obj, attribute)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)


def quick(environment: ImmutableSandboxedEnvironment) -> Quick:
    """The same settings, filters, tests, globals and extensions behind the quicker door; `environment` itself is not changed."""
    copy = environment.overlay()
    copy.__class__ = Quick
    return cast("Quick", copy)
