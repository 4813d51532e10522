"""The engine's own numbers reach /metrics of a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.request import urlopen

import tokentrue as tt
from tokentrue.app.background import BackgroundGateway
from tokentrue.gateway.metrics import engine_families
from tokentrue.providers.pool import Pool
from tokentrue.providers.scripted import ScriptedProvider

ASSET = Path(__file__).parents[2] / "tokentrue" / "assets" / "calculator"
TURN: dict[str, Any] = {
    "model": "calculator",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "what is 12 + 30 ?"}],
}


def test_first_token_time_speed_cache_and_prefix_hits_are_on_the_page() -> None:
    with BackgroundGateway(str(ASSET)) as gateway, tt.Client(gateway.url, gateway.admin_key) as client:
        for _ in range(2):
            with client.session() as session:
                session.openai().chat.completions.create(**TURN)
        with urlopen(f"{gateway.url}/metrics") as answer:
            text = answer.read().decode()
    values = {
        line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith("tokentrue_engine_")
    }
    assert values["tokentrue_engine_requests_total"] == 2 and 2 <= values["tokentrue_engine_sampled_tokens_total"] <= 16
    assert values["tokentrue_engine_prefix_hit_tokens_total"] == 16  # the second prompt's full page
    assert values["tokentrue_engine_first_token_seconds_p50"] > 0 and values["tokentrue_engine_tokens_per_second"] > 0
    assert values["tokentrue_engine_kv_blocks_used"] == 0 < values["tokentrue_engine_kv_blocks_total"]


def test_a_remote_engine_adds_nothing() -> None:
    assert engine_families(Pool([ScriptedProvider([])])) == []
