-- Sessions and their nodes.
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, grp TEXT, state TEXT NOT NULL, key_hash TEXT,
    created REAL NOT NULL, ended REAL, body BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE nodes (
    session TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
    seq INTEGER NOT NULL, id TEXT NOT NULL, parent TEXT,
    given_ids BLOB NOT NULL, sampled_ids BLOB NOT NULL, logprobs BLOB NOT NULL, chain BLOB NOT NULL,
    body BLOB NOT NULL, routed_experts BLOB, created REAL NOT NULL,
    PRIMARY KEY (session, seq)
);
CREATE UNIQUE INDEX nodes_by_id ON nodes(session, id);
