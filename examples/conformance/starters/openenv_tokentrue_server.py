"""tokentrue in front of an engine, and OpenEnv's capture server in front of tokentrue: PYTHON_OF_OPENENV ENGINE PORT
FOLDER MODEL PYTHONPATH."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

KEY = "openenv-in-front-of-tokentrue"


def main(openenv: str, engine: str, port: str, folder: str, model: str, path: str) -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    serve = ["-m", "tokentrue", "serve", "--model", model, "--set", "model.name=standin", "--engine", "sglang"]
    serve += ["--url", engine, "--store", f"sqlite:{folder}/journal.sqlite", "--port", url.rpartition(":")[2]]
    environment = {**os.environ, "PYTHONPATH": path, "TOKENTRUE_ADMIN_KEY": KEY}
    gateway = subprocess.Popen([sys.executable, *serve], env=environment)
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    for _ in range(600):
        try:
            request = urllib.request.Request(url + "/sessions", b"{}", headers, method="POST")
            with urllib.request.urlopen(request, timeout=5) as answer:
                key = json.load(answer)["api_key"]  # OpenEnv sends one key: all of its sessions are one of ours
            break
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    capture = ["-m", "openenv.core.harness.capture.server", "--llm-url", f"{url}/v1", "--model", "standin"]
    try:
        return subprocess.call([openenv, *capture, "--api-key", key, "--port", port])
    finally:
        gateway.terminate()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
