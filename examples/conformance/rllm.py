"""rllm-model-gateway: a proxy that asks the engine for ids and keeps one trace per call."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tokentrue.conformance import Row, Session, Target, merge_calls


class Rllm(Target):
    name, requires = "rllm-model-gateway", ("rllm-model-gateway==0.1.0",)
    not_promised: ClassVar = {
        "2.several": "its documents do not mention `n`; a trace holds one answer",
        "6": "traces have no policy version",
        "7": "the engine renders the prompt",
        "8": "no export with a check",
        "9": "no images in traces",
    }

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        store = ["--store", "sqlite", "--db-path", str(folder / "traces.sqlite")]
        return [self.python, "-m", "rllm_model_gateway", "--port", str(port), "--worker", f"{engine}/v1", *store]

    def open(self) -> Session:
        made = self.post("/sessions")
        return Session(id=made["session_id"], urls={"chat": f"{self.url}{made['url']}/chat/completions"})

    def rows(self, session: Session) -> Sequence[Row]:
        calls = []
        for trace in self.get(f"/sessions/{session.id}/traces"):
            given, sampled = trace["prompt_token_ids"], trace["completion_token_ids"]
            mask, logprobs = [0] * len(given) + [1] * len(sampled), [None] * len(given) + (trace["logprobs"] or [])
            calls.append(Row(ids=given + sampled, mask=mask, logprobs=logprobs))
        return merge_calls(calls)
