"""Sessions on a gateway over HTTP. Every model call carries an Idempotency-Key made of its body and the number of times
this rollout sent that body before: a retry, or a rollout that restarts in its session, gets the recorded answers and
adds nothing."""

import asyncio
import contextlib
import copy
import hashlib
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from tokentrue.client import AsyncClient, session_path
from tokentrue.environments.runner import Plan, session_settings
from tokentrue.errors import ConfigError, SessionConflict
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.samples.images import ImageFolder

END_S = 10.0  # to end the session of a failed rollout
TIMEOUT_S, RETRIES = 120.0, 2  # of a call
SESSION_IN_PATH = re.compile(r"/sessions/([^/]+)/v1/")


def resumed_id(plan: Plan) -> str:
    return hashlib.sha256(plan.key.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class GatewaySession:
    session_id: str
    client: Any
    admin: AsyncClient
    images: ImageFolder | None = None

    async def finish(self, reward: float) -> tuple[Sequence[JsonObject], JsonMapping]:
        await self.admin.reward_session(self.session_id, reward)
        answer = await self.admin.call("GET", f"{session_path(self.session_id)}/samples")
        if self.images is not None:
            for name in {image["sha256"] for row in answer["samples"] for image in row.get("images", ())}:
                if name not in self.images:
                    self.images.add(name, await self.admin.session_image(self.session_id, name))
        return answer["samples"], answer["coverage"]


class GatewaySessions:
    """`resume` (needs the admin key) names sessions after their rollouts, so that a restarted rollout resumes its
    session; `is_retried` selects errors after which it restarts."""

    def __init__(
        self,
        base_url: str,
        *,
        sampling: JsonMapping,
        pin: Sequence[str] | None = None,
        side_requests: str | None = None,
        admin_key: str | None = None,
        purge: bool = False,
        resume: bool = False,
        is_retried: Callable[[Exception], bool] = lambda _: False,
    ) -> None:
        try:
            import openai
        except ImportError as error:
            raise ConfigError("the OpenAI client is missing: pip install 'tokentrue[train]'") from error
        self.base_url = base_url.rstrip("/")
        self._sampling, self._pin, self._side_requests, self._purge = dict(sampling), pin, side_requests, purge
        self._resume, self._is_retried = resume and admin_key is not None, is_retried
        self._images: ImageFolder | None = None
        self._sent: Counter[tuple[str, str]] = Counter()
        self.admin = AsyncClient(base_url, admin_key, timeout_s=TIMEOUT_S, retries=RETRIES)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        hooks = {"request": [self._name]}
        http = openai.DefaultAsyncHttpxClient(limits=limits, timeout=TIMEOUT_S, event_hooks=hooks)
        self._openai = openai.AsyncOpenAI(
            base_url=self.base_url, api_key="unset", http_client=http, max_retries=RETRIES
        )

    def saving(self, images: ImageFolder) -> "GatewaySessions":
        made = copy.copy(self)
        made._images = images
        return made

    async def __aenter__(self) -> "GatewaySessions":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._openai.close()
        await self.admin.close()

    async def _name(self, request: httpx.Request) -> None:
        found = SESSION_IN_PATH.search(request.url.path)
        if found is None or request.method != "POST":
            return
        body = hashlib.sha256(request.content).hexdigest()[:24]
        if request.headers.get("x-stainless-retry-count", "0") == "0":  # the client marks its own retries
            self._sent[(found[1], body)] += 1
        request.headers["Idempotency-Key"] = f"{body}-{self._sent[(found[1], body)]}"

    def forget(self, session_id: str) -> None:
        for key in [key for key in self._sent if key[0] == session_id]:
            del self._sent[key]

    @contextlib.asynccontextmanager
    async def open(self, plan: Plan) -> AsyncGenerator[GatewaySession]:
        """Ended with the block, unless the rollout will be resumed."""
        # shielded: the gateway may hold the session already when a cancellation arrives
        creating = asyncio.ensure_future(self._create(plan))
        try:
            session_id, base_url, api_key = await asyncio.shield(creating)
            client = self._openai.with_options(base_url=base_url, api_key=api_key)
            yield GatewaySession(session_id, client, self.admin, self._images)
        except BaseException as error:
            is_kept = self._resume and (not isinstance(error, Exception) or self._is_retried(error))
            if is_kept:
                creating.cancel()
            else:
                # purge a resumable session: the rollout may run again under its name
                async def end_created() -> None:
                    await self._end((await creating)[0], purge=self._purge or self._resume)

                with contextlib.suppress(Exception):
                    await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(end_created())), END_S)
            raise
        await self._end(session_id, purge=self._purge)

    async def _end(self, session_id: str, *, purge: bool) -> None:
        await (self.admin.delete_session if purge else self.admin.end_session)(session_id)
        self.forget(session_id)

    async def _create(self, plan: Plan) -> tuple[str, str, str]:
        settings = session_settings(plan, self._sampling, self._pin, self._side_requests)
        if not self._resume:
            made = await self.admin.open(**settings)
            return made.id, made.base_url, made.api_key
        session_id = resumed_id(plan)
        try:
            key = (await self.admin.open(**settings, session_id=session_id)).api_key
        except SessionConflict:  # it was started before: an agent gets a key of this session, never the admin key
            self.forget(session_id)
            key = (await self.admin.call("POST", f"{session_path(session_id)}/key"))["api_key"]
        return session_id, f"{self.base_url}{session_path(session_id)}/v1", key

    async def read_ended(self, plan: Plan) -> tuple[str, float, Sequence[JsonObject], JsonMapping]:
        session_id = resumed_id(plan)
        state = await self.admin.session_state(session_id)
        if state["state"] != "ended" or state["reward"] is None:
            raise SessionConflict(f"session {session_id!r} is in use")
        answer = await self.admin.call("GET", f"{session_path(session_id)}/samples")
        return session_id, float(state["reward"]), answer["samples"], answer["coverage"]
