"""Agent Lightning's LLMProxy: LiteLLM with a middleware that names the rollout; calls become triplets of ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tokentrue.conformance import Row, Session, Target, merge_calls


class AgentLightning(Target):
    name, requires, ready = "agentlightning", ("agentlightning==0.3.0",), "/rows"
    not_promised: ClassVar = {
        "1.2": "triplets have ids and no log-probabilities: its trainer computes them again",
        "5.kill": "spans are in memory",
        "6": "triplets have no policy version",
        "7": "the engine renders the prompt",
        "8": "no export with a check",
        "9": "a triplet does not say at which tokens an image is",
    }

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        starter = Path(__file__).parent / "starters" / "agentlightning_server.py"
        return [self.python, str(starter), engine, str(port)]

    def environment(self) -> Mapping[str, str]:
        return {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}

    def open(self) -> Session:
        made = self.post("/open")
        urls = {"chat": f"{made['url']}/v1/chat/completions", "anthropic": f"{made['url']}/v1/messages"}
        return Session(id=made["id"], urls=urls, headers={"authorization": "Bearer none"})

    def rows(self, session: Session) -> Sequence[Row]:
        pairs = self.get(f"/rows?id={session.id}")
        masks = [[0] * len(given) + [1] * len(sampled) for given, sampled in pairs]
        columns = zip(pairs, masks, strict=True)
        return merge_calls([Row(ids=g + s, mask=m, logprobs=[None] * len(m)) for (g, s), m in columns])
