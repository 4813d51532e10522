"""OpenPipe ART: HTTPX hooks that capture calls of the OpenAI SDK, behind a chat route. Of SDK 3, which has another HTTP
library, the hooks see nothing."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tokentrue.conformance import Row, Session, Target


class Art(Target):
    name, ready = "openpipe-art", "/x/rows"
    requires = ("openpipe-art==0.5.18", "openai<3", "torch", "transformers", "pillow", "aiohttp", "jinja2")
    not_promised: ClassVar = {
        "2.several": "its documents do not mention `n`; a history holds one answer",
        "3.content_parts": "it hands parts to the chat template as they are, and the shipped model's takes strings",
        "5.kill": "trajectories are in memory",
        "6": "tokens have no policy version",
        "7": "the engine renders the prompt",
        "8": "no export with a check",
        "9": "not tried with images",
    }

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        return [self.python, str(Path(__file__).parent / "starters" / "art_server.py"), engine, str(port), str(model)]

    def open(self) -> Session:
        name = uuid.uuid4().hex
        return Session(id=name, urls={"chat": f"{self.url}/{name}/chat"})

    def rows(self, session: Session) -> Sequence[Row]:
        return [Row(**row) for row in self.get(f"/{session.id}/rows")]
