"""What other packages add by entry points of four groups: `tokentrue.providers`, `tokentrue.exporters`,
`tokentrue.families` and `tokentrue.environments`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from tokentrue.errors import ConfigError


def find_plugins(group: Literal["providers", "exporters", "families", "environments"]) -> dict[str, EntryPoint]:
    found = entry_points(group=f"tokentrue.{group}")
    return {plugin.name: plugin for plugin in sorted(found, key=lambda plugin: plugin.name)}


def load_plugin(plugin: EntryPoint) -> Any:
    try:
        return plugin.load()
    except Exception as error:  # the module is another package's: it may raise anything
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{plugin.group}: {plugin.name} ({plugin.value}) cannot be loaded: {said}; mend or uninstall its package"
        ) from error
