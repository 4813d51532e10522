"""Records docs/figures/terminal.svg: a gateway, an agent, its samples and the viewer, as they print.

    python scripts/record_terminal.py

Every line is the output of the command above it, run here with the shipped model. The free port and the admin key of
the run are written as 8000 and as the variable's name.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "figures" / "terminal.svg"
KEY = "tta-recorded-in-this-run"
WIDTH = 118
SHOWN = ("tokentrue gateway", "export TOKENTRUE_URL", "OpenAI client", "viewer")  # lines of the banner


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)

    def show(command: str, output: str) -> None:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text(output.strip() + "\n"))

    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "TOKENTRUE_ADMIN_KEY": KEY,
            "PYTHONPATH": str(ROOT),
            "NO_COLOR": "1",
            "COLUMNS": str(WIDTH),
        }
        python = [sys.executable, "-m", "tokentrue"]

        def run(*words: str) -> str:
            done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=True)
            return done.stdout.replace(url, "http://127.0.0.1:8000")

        serving = subprocess.Popen(
            [*python, "serve", "--port", "0"],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert serving.stdout is not None
        viewing = None
        try:
            banner: list[str] = []
            while not banner or not banner[-1].lstrip().startswith("samples"):
                line = serving.stdout.readline()
                assert line, "tokentrue serve ended"
                banner.append(line.rstrip())
            url = re.findall(r"http://[\w.]+:\d+", banner[0])[0]
            env["TOKENTRUE_URL"] = url
            lines = [
                line.replace(url, "http://127.0.0.1:8000") for line in banner if any(part in line for part in SHOWN)
            ]
            show("tokentrue serve &", "\n".join(lines))
            show("python examples/openai_sdk.py", run(sys.executable, str(ROOT / "examples" / "openai_sdk.py")))
            command = "tokentrue samples http://127.0.0.1:8000 -o samples.jsonl"
            show(command, run(*python, "samples", url, "-o", "samples.jsonl"))
            show("tokentrue audit samples.jsonl", run(*python, "audit", "samples.jsonl"))
            viewing = subprocess.Popen(
                [*python, "view", url, "--model", "calculator", "--port", "0"],
                cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
            assert viewing.stdout is not None
            said = re.sub(r"127\.0\.0\.1:\d+/[\w-]+/", "127.0.0.1:8010/…/", viewing.stdout.readline())
            said = said.replace(url.partition("://")[2], "127.0.0.1:8000")
            show("tokentrue view http://127.0.0.1:8000 --model calculator", said)
        finally:
            for process in (viewing, serving):
                if process is not None:
                    process.terminate()
                    process.wait(40)
                    time.sleep(0.1)
    svg = console.export_svg(title="serve, an agent, its samples, the viewer", unique_id="terminal")
    # No request to another server: the reader's own monospaced font takes the place of the one that rich names.
    TARGET.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")
    print(TARGET)


if __name__ == "__main__":
    main()
