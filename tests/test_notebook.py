"""examples/first_run.ipynb runs from top to bottom in an empty folder: serve, agent, break, view, train."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "first_run.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")  # of the notebook tools
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # `tokentrue view`
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    sampled = re.search(r"1 sample of \d+ tokens; (\d+) of (\d+) sampled tokens are trained", text)
    assert sampled is not None and sampled[1] == sampled[2] != "0"
    beyond = re.search(r"; (\d+) of \d+ sampled tokens lie beyond", text)
    assert beyond is not None and int(beyond[1]) > 0, "rendering the messages again does not give the record"
    assert (tmp_path / "view.html").stat().st_size > 100_000
    rewards = re.search(r"mean reward per step: (.*)", text)
    assert rewards is not None and len(rewards[1].split()) == 4
    assert float(rewards[1].split()[-1]) > float(rewards[1].split()[0]), "the reward rises"
    compared = re.search(r"(\d+) of ([\d,]+) log-probabilities of rollout and trainer differ", text)
    assert compared is not None and compared[1] == "0" and int(compared[2].replace(",", "")) > 1000


def test_the_notebook_names_no_machine_and_shows_what_it_printed() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert re.search(r"\b0 of [\d,]+ log-probabilities of rollout and trainer differ in any bit", text)
    assert not re.search(r"/(home|root|work|tmp|Users)/", text)
