-- Sessions are found by API key, by group and by age without reading them all.
CREATE UNIQUE INDEX sessions_by_key ON sessions(key_hash) WHERE key_hash IS NOT NULL;
CREATE INDEX sessions_by_group ON sessions(grp);
CREATE INDEX sessions_by_age ON sessions(state, ended);
