"""OpenEnv's capture server with tokentrue as its `--llm-url`: it asks us for ids, and we ask the engine."""

import sys
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import tokentrue

HERE = Path(__file__).parent
spec: Any = spec_from_file_location("openenv_target", HERE / "openenv.py")
openenv = module_from_spec(spec)
spec.loader.exec_module(openenv)


class OpenEnvOverTokentrue(openenv.OpenEnv):
    name, engine = "openenv over tokentrue", "sglang"

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        starter = HERE / "starters" / "openenv_tokentrue_server.py"
        path = Path(tokentrue.__file__).parent.parent
        return [sys.executable, *map(str, (starter, self.python, engine, port, folder, model, path))]
