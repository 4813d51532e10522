"""slime's protocol adapters: they render each request, ask SGLang by ids, and keep a tree of messages with token records.
`--python PATH` names an environment with slime, SGLang's parsers and transformers."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tokentrue.conformance import Row, Session, Target


class Slime(Target):
    name, engine, ready = "slime", "sglang", "/rows"
    requires = ("slime @ git+https://github.com/THUDM/slime@624b824a", "sglang==0.5.22", "aiohttp", "transformers")
    not_promised: ClassVar = {
        "5.kill": "trajectories are in memory",
        "6": "a sample has no policy version per token",
        "8": "no export with a check",
        "9": "its adapters write [image omitted]",
    }

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        return [self.python, str(Path(__file__).parent / "starters" / "slime_server.py"), engine, str(port), str(model)]

    def open(self) -> Session:
        made, name = self.get("/ports"), uuid.uuid4().hex
        paths = {"chat": "chat/completions", "anthropic": "messages"}
        urls = {dialect: f"http://127.0.0.1:{made[dialect]}/v1/{path}" for dialect, path in paths.items()}
        return Session(id=name, urls=urls, headers={"authorization": f"Bearer {name}"})

    def rows(self, session: Session) -> Sequence[Row]:
        return [Row(**row) for row in self.get(f"/rows?id={session.id}")]
