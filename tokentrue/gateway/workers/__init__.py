"""Several worker processes behind one port: who owns a session, how requests reach the owner, how workers are
started."""
