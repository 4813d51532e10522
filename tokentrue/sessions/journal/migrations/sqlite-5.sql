-- Files of images, once per store, and which sessions refer to them.
CREATE TABLE images (sha256 TEXT PRIMARY KEY, media_type TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE session_images (
    session TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
    sha256 TEXT NOT NULL REFERENCES images(sha256), PRIMARY KEY (session, sha256)
) WITHOUT ROWID;
CREATE INDEX sessions_by_image ON session_images(sha256);
