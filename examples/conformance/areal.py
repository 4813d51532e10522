"""AReaL's OpenAI client, which its proxy serves: it renders each request, asks SGLang by ids, and keeps one interaction per
call. `--python PATH` names an environment with AReaL."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tokentrue.conformance import Row, Session, Target, merge_calls


class AReaL(Target):
    name, engine, ready = "areal", "sglang", "/x/rows"
    requires = ("areal==1.0.4", "sglang==0.5.22", "aiohttp")
    not_promised: ClassVar = {
        "5.kill": "interactions are in memory",
        "6": "the trainer tells its engine the version; this starter has no trainer",
        "8": "no export with a check",
        "9": "not tried with images",
    }

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        return [self.python, str(Path(__file__).parent / "starters" / "areal_server.py"), engine, str(port), str(model)]

    def open(self) -> Session:
        name = uuid.uuid4().hex
        return Session(id=name, urls={"chat": f"{self.url}/{name}/chat"})

    def rows(self, session: Session) -> Sequence[Row]:
        return merge_calls([Row(**row) for row in self.get(f"/{session.id}/rows")])
