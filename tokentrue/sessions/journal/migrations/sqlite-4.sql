-- Secrets of the store, shared by every gateway that opens it.
CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL, created REAL NOT NULL) WITHOUT ROWID;
