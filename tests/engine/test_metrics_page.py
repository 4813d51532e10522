"""The engine's own numbers reach the gateway's /metrics."""

from __future__ import annotations

from tests.engine.world import build
from tokentrue.gateway.metrics import Metrics, engine_families, page
from tokentrue.providers.exact import ExactProvider
from tokentrue.types import Sampling


async def test_first_token_time_speed_cache_and_prefix_hits_are_on_the_page() -> None:
    provider = ExactProvider(build("qwen3"))
    for _ in range(2):
        await provider.generate(list(range(3, 60)), Sampling(max_tokens=5, seed=1))
    text = page([[*Metrics().snapshot(), *engine_families(provider)]]).decode()
    await provider.close()
    values = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith("tokentrue_engine_")}
    assert values["tokentrue_engine_sampled_tokens_total"] == 10
    assert values["tokentrue_engine_prefix_hit_tokens_total"] == 48
    assert values["tokentrue_engine_first_token_seconds_p50"] > 0 and values["tokentrue_engine_tokens_per_second"] > 0
    assert values["tokentrue_engine_kv_blocks_used"] == 0 < values["tokentrue_engine_kv_blocks_total"]
    assert engine_families(object()) == []
