"""Removes the directories of a run that was killed. Run as a program, with the standard library alone: `janitor.py
FOLDER PREFIX`.

Its standard input is a pipe from the run. When the run ends, however it ends, the pipe closes; what is then left of its
directories is removed, again and again until nothing is: supervisors may still be killing agents that write there.
"""

import glob
import os
import shutil
import sys
import time

PATIENCE_S = 30.0


def main() -> int:
    folder, prefix = sys.argv[1:]
    while os.read(0, 1):
        pass
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        left = glob.glob(os.path.join(glob.escape(folder), glob.escape(prefix) + "*"))
        if not left:
            return 0
        for directory in left:
            shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.1)
    return 1


if __name__ == "__main__":
    sys.exit(main())
