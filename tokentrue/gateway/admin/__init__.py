"""Everything but model requests: sessions, rewards, samples, administration, health, metrics, the OpenAPI document."""
