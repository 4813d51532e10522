"""One table of engines; what names them elsewhere follows it."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tokentrue.errors import ConfigError
from tokentrue.providers import registry

ENGINES_PAGE = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_page_has_a_row_for_every_engine() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", ENGINES_PAGE.read_text(), re.M)
    assert sorted(rows) == sorted(registry.ENGINES)


class MinimalServer:
    """The keywords that every server's class must take (docs/new-engine.md)."""

    def __init__(self, *, url: str, api_key: str | None = None) -> None:
        self.url = url


def test_the_doctor_asks_a_server_for_no_option_that_was_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokentrue.cli.doctor import load_engine

    kind = registry.EngineKind(address=f"{__name__}:MinimalServer", options=("url", "api_key"), remote=True)
    monkeypatch.setattr(registry, "ENGINES", {**registry.ENGINES, "minimal": kind})
    engine, module = load_engine("minimal", "http://127.0.0.1:1", "unused", "float32", None)
    assert isinstance(engine, MinimalServer) and engine.url == "http://127.0.0.1:1" and module is None
    with pytest.raises(ConfigError, match="'minimal' has no option 'adapter'"):
        load_engine("minimal", "http://127.0.0.1:1", "unused", "float32", "policy")


@pytest.mark.parametrize("address", ["tokentrue_not_there:Engine", "tests.providers.test_registry:NotThere"])
def test_an_engine_of_another_package_that_cannot_be_loaded_is_no_internal_error(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    broken = EntryPoint(name="broken", value=address, group="tokentrue.providers")
    monkeypatch.setattr(registry, "find_plugins", lambda _: {"broken": broken})
    with pytest.raises(ConfigError, match=f"broken .{address}. cannot be loaded: .*mend or uninstall its package"):
        registry.load("broken", url="http://127.0.0.1:1")


def test_an_engine_of_another_package_that_lacks_torch_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wants_torch.py").write_text("raise ModuleNotFoundError('No module', name='torch')")
    monkeypatch.syspath_prepend(tmp_path)
    wanting = EntryPoint(name="wanting", value="wants_torch:Engine", group="tokentrue.providers")
    monkeypatch.setattr(registry, "find_plugins", lambda _: {"wanting": wanting})
    with pytest.raises(ConfigError, match="'wanting' needs torch: pip install"):
        registry.load("wanting")


@pytest.mark.parametrize("command", ["serve", "doctor", "train", "rollout"])
def test_help_names_the_engines(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from tokentrue.cli.main import main

    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in registry.REMOTE + registry.IN_PROCESS)
