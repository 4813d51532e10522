-- Every row carries a digest of itself, every session the number of its nodes, and the store the number of its
-- sessions. `_fill_digests` fills them in.
ALTER TABLE sessions ADD COLUMN digest BLOB;
ALTER TABLE sessions ADD COLUMN nodes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE nodes ADD COLUMN digest BLOB;
CREATE TABLE totals (name TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
