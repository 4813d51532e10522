"""Makes the environments of `make test-frameworks`, where they are missing: `python -m tests.integrations.environments
FRAMEWORKS_PYTHON VERIFIERS_PYTHON HARBOR_PYTHON OPENENV_PYTHON`.

The trainers' requirements exclude each other, so each is installed without them, with what its rows need, into an
environment that sees this one's packages, torch among them, behind its own. The others have theirs to themselves.
"""

from __future__ import annotations

import shutil
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
    "skyrl": ["skyrl==0.3.0", "skyrl-gym", "loguru", "jaxtyping"],
    "areal": [
        *("areal==1.0.4", "aiofiles", "blinker", "colorlog", "einops", "flask", "itsdangerous", "lark", "llvmlite"),
        "numba",
    ],
    "openrlhf": ["openrlhf==0.11.2"],
    "tinker": ["tinker==0.36.0"],
    "what prime-rl imports": ["prime-pydantic-config==0.4.3"],
}
VERIFIERS = {"verifiers": ["verifiers==0.4.0", "uv", "orjson", "msgspec"]}
HARBOR = {"harbor": ["harbor==0.24.0"]}
OPENENV = {"openenv": ["openenv==0.10.0"]}


def main(frameworks: Path, verifiers: Path, harbor: Path, openenv: Path) -> None:
    make(frameworks, FRAMEWORKS, "--no-deps", shares=True)
    make(verifiers, VERIFIERS)
    make(harbor, HARBOR, base=newer_python())
    make(openenv, OPENENV)


def newer_python() -> str:
    """A Python that Harbor accepts, 3.12 or newer."""
    if sys.version_info >= (3, 12):
        return sys.executable
    on_path = [found for name in ("python3.12", "python3.13") if (found := shutil.which(name))]
    of_pyenv = map(str, sorted(Path.home().glob(".pyenv/versions/3.1[2-9].*/bin/python")))
    for found in (*on_path, *of_pyenv):
        if subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:  # pyenv's shims may fail
            return found
    return ""


def make(
    python: Path, groups: dict[str, list[str]], *flags: str, shares: bool = False, base: str = sys.executable
) -> None:
    if python.exists():
        print(f"{python}: is there")
        return
    if not base:
        print(f"{python}: NOT made: {', '.join(groups)} needs Python 3.12 or newer, and none is on PATH", flush=True)
        return
    folder = python.parent.parent
    if subprocess.run([base, "-m", "venv", folder]).returncode:
        print(f"{python}: NOT made: {base} -m venv failed", flush=True)
        return
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
