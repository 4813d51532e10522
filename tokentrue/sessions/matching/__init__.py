"""Finds the recorded turn that a request continues. Loose keys find candidates, projections check every served turn
on their path, exact comparison checks every given message, and the matcher chooses. Read `matcher.py` first."""
