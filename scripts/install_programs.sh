#!/bin/sh
# install_programs.sh PYTHON: what tests run besides Python. Chromium for the viewer (the system's own where there is one,
# Debian's where apt may install it, else the build that Playwright downloads), bubblewrap for the sandbox and PostgreSQL
# for the journal (from apt alone). Tests of a program that cannot be installed fail or are skipped, and say which.
set -u
has() { command -v "$1" >/dev/null 2>&1; }
has_browser() { has chromium || has chromium-browser || has google-chrome; }
missing=""
has_browser || missing="chromium fonts-dejavu-core"
has bwrap || missing="$missing bubblewrap"
has initdb || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$missing postgresql"
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && has apt-get; then
  apt-get update -qq
  for name in $missing; do
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$name" >/dev/null ||
      echo "apt cannot install $name: its tests are skipped or fail" >&2
  done
fi
has_browser || "$1" -m playwright install chromium ||
  echo "no browser could be installed: the viewer's browser tests will fail; install chromium by hand" >&2
exit 0
