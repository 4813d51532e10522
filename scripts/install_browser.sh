#!/bin/sh
# install_browser.sh PYTHON: a Chromium for the viewer's tests. The system's own where there is one, Debian's where apt may install it,
# else the build that Playwright downloads. Without any, the viewer's browser tests fail and say so; no other test needs a browser.
set -u
for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null 2>&1; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null && exit 0
fi
"$1" -m playwright install chromium && exit 0
echo "no browser could be installed: the viewer's browser tests will fail; install chromium by hand" >&2
exit 0
