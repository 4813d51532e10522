"""Makes the environments of `make test-frameworks`, where they are missing: `python -m tests.integrations.environments
FRAMEWORKS_PYTHON VERIFIERS_PYTHON`.

The frameworks' requirements exclude each other, so each is installed without them, with what its rows need. Both
environments see this one's packages, torch among them, behind their own.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

# A group is installed whole or not at all.
FRAMEWORKS = {
    "verl": [
        *("verl==0.9.1", "TransferQueue==0.1.11", "antlr4-python3-runtime==4.9.3", "cachetools", "cloudpickle"),
        *(
            "codetiming",
            "fastapi",
            "hydra-core",
            "omegaconf",
            "pylatexenc",
            "pyvers",
            "pyzmq",
            "tensordict",
            "torchdata",
        ),
    ],
    "skyrl": ["skyrl==0.3.0", "skyrl-gym", "loguru"],
    "areal": ["areal==1.0.4"],
    "openrlhf": ["openrlhf==0.11.2"],
    "tinker": ["tinker==0.36.0"],
}
VERIFIERS = {"verifiers": ["verifiers==0.4.0", "uv", "orjson", "msgspec"]}


def main(frameworks: Path, verifiers: Path) -> None:
    make(frameworks, FRAMEWORKS, "--no-deps", shares=True)
    make(verifiers, VERIFIERS, shares=False)


def make(python: Path, groups: dict[str, list[str]], *flags: str, shares: bool) -> None:
    if python.exists():
        print(f"{python}: is there")
        return
    folder = python.parent.parent
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if shares:
        own = Path(
            subprocess.check_output(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
            ).strip()
        )
        (own / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name, packages in groups.items():
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *flags, *packages], capture_output=True, text=True
        )
        said = done.stderr.strip().splitlines()[-1:] or [""]
        print(f"{python}: {name} {'installed' if done.returncode == 0 else f'NOT installed: {said[0]}'}", flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
