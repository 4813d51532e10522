CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS gateways (name TEXT PRIMARY KEY, url TEXT NOT NULL, expires TIMESTAMPTZ NOT NULL);
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value BYTEA NOT NULL, created DOUBLE PRECISION NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT COLLATE "C" PRIMARY KEY, grp TEXT, state TEXT NOT NULL, key_hash TEXT,
    created DOUBLE PRECISION NOT NULL, ended DOUBLE PRECISION, body BYTEA NOT NULL, digest BYTEA NOT NULL,
    nodes INTEGER NOT NULL DEFAULT 0, owner TEXT, token BIGINT NOT NULL DEFAULT 1
);
CREATE TABLE IF NOT EXISTS nodes (
    session TEXT COLLATE "C" NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
    seq INTEGER NOT NULL, id TEXT NOT NULL, parent TEXT,
    given_ids BYTEA NOT NULL, sampled_ids BYTEA NOT NULL, logprobs BYTEA NOT NULL, chain BYTEA NOT NULL,
    body BYTEA NOT NULL, routed_experts BYTEA, created DOUBLE PRECISION NOT NULL, digest BYTEA NOT NULL,
    PRIMARY KEY (session, seq)
);
CREATE TABLE IF NOT EXISTS images (sha256 TEXT COLLATE "C" PRIMARY KEY, media_type TEXT NOT NULL, data BYTEA NOT NULL);
CREATE TABLE IF NOT EXISTS session_images (
    session TEXT COLLATE "C" NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
    sha256 TEXT COLLATE "C" NOT NULL REFERENCES images(sha256), PRIMARY KEY (session, sha256)
);
CREATE INDEX IF NOT EXISTS sessions_by_image ON session_images(sha256);
CREATE UNIQUE INDEX IF NOT EXISTS nodes_by_id ON nodes(session, id);
CREATE UNIQUE INDEX IF NOT EXISTS sessions_by_key ON sessions(key_hash) WHERE key_hash IS NOT NULL;
CREATE INDEX IF NOT EXISTS sessions_by_group ON sessions(grp);
CREATE INDEX IF NOT EXISTS sessions_by_age ON sessions(state, ended);
CREATE INDEX IF NOT EXISTS sessions_by_creation ON sessions(created, id);
