"""Miles' session server: it appends ids to those already served, on a fixed template of the family, and asks SGLang's chat
route with `input_ids`. `--python PATH` names an environment with Miles, SGLang and transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tokentrue.conformance import Row, Session, Target


class Miles(Target):
    name = "miles"
    requires = ("miles @ git+https://github.com/radixark/miles@31f1ca96", "sglang==0.5.22", "transformers")
    not_promised: ClassVar = {
        "2.several": "one answer to a request",
        "5.kill": "sessions are in memory",
        "6": "weight versions are per sample, not per token",
        "8": "no export with a check",
        "9": "by its guide, sessions carry no images",
    }

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        return [self.python, str(Path(__file__).parent / "starters" / "miles_server.py"), engine, str(port), str(model)]

    def open(self) -> Session:
        name = self.post("/sessions")["session_id"]
        return Session(id=name, urls={"chat": f"{self.url}/sessions/{name}/v1/chat/completions"})

    def rows(self, session: Session) -> Sequence[Row]:
        return [Row(**row) for row in self.get(f"/rows/{session.id}")]
