"""Every notebook runs from a fresh kernel, and what is stored in it is what a run shows today.

A cell tagged `varies` shows what was sampled after training, which may be something else on another machine: of such a
cell only the kinds of its outputs are compared, and every reward that it prints as `before -> after` must have risen.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
VARIES = "varies"
MAX_BYTES = 200_000

_LOCAL = re.compile(r"(?<![\w.])/(?:home|root|tmp|Users|private|usr|opt|var|mnt|work)/|\b[A-Z]:\\")
_ROSE = re.compile(r"reward\D*?(-?\d+\.\d+) -> (-?\d+\.\d+)")


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def is_sampled(cell: Any) -> bool:
    return VARIES in cell.metadata.get("tags", [])


def shown(cell: Any) -> list[tuple[str, str]]:
    """Kind and text of each thing a cell shows; a stream that came in pieces is one, a picture has no text."""
    found: list[tuple[str, str]] = []
    for output in cell.outputs:
        if output.output_type == "stream":
            if found and found[-1][0] == output.name:
                found[-1] = (output.name, found[-1][1] + output.text)
            else:
                found.append((output.name, output.text))
        elif output.output_type == "error":
            found.append(("error", output.ename))
        else:
            texts = {kind: "" if kind.startswith("image/") else str(text) for kind, text in output.data.items()}
            found += sorted(texts.items())
    return found


def blemishes(notebook: Any) -> list[str]:
    """What a stored notebook is not to have: cells not run in order, errors, warnings, local paths, no picture."""
    cells = code_cells(notebook)
    everything = [(kind, text) for cell in cells for kind, text in shown(cell)]
    found = []
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("not run in order")
    if "image/png" not in {kind for kind, _ in everything}:
        found.append("no picture")
    found += [f"{kind}: {text}" for kind, text in everything if kind in ("stderr", "error")]
    found += [f"warning: {text}" for _, text in everything if "Warning" in text]
    places = (str(ROOT), sys.prefix, str(Path.home()), tempfile.gettempdir())
    words = "\n".join([*(cell.source for cell in notebook.cells), *(text for _, text in everything)])
    found += [f"local path: {match[0]}" for match in _LOCAL.finditer(words)]
    found += [f"local path: {place}" for place in places if len(place) > 1 and place in words]
    return found


def differences(stored: Any, fresh: Any) -> Iterator[str]:
    """Cells that show something else than what is stored, by their id."""
    for old, new in zip(code_cells(stored), code_cells(fresh), strict=True):
        before, after = shown(old), shown(new)
        if is_sampled(old):
            before, after = ([(kind, "") for kind, _ in each] for each in (before, after))
        if before != after:
            yield f"{old.id}: stored {before}, now {after}"


def rewards(notebook: Any) -> list[tuple[float, float]]:
    """Each reward that a sampled cell prints as `before -> after`."""
    texts = [text for cell in code_cells(notebook) if is_sampled(cell) for _, text in shown(cell)]
    return [(float(match[1]), float(match[2])) for text in texts for match in _ROSE.finditer(text)]


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Runs a notebook as a user would, in an empty folder and in this very Python, whatever kernels are installed."""
    spec = tmp_path / "kernels" / "python3"
    places = {name: tmp_path / name for name in ("here", "temporary", "ipython", "runtime")}
    for folder in (spec, *places.values()):
        folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    monkeypatch.setenv("TMPDIR", str(places["temporary"]))
    monkeypatch.setenv("IPYTHONDIR", str(places["ipython"]))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(places["runtime"]))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    children = psutil.Process().children(recursive=True)

    def run(notebook: Any) -> Any:
        kernels = KernelSpecManager(kernel_dirs=[str(spec.parent)], ensure_native_kernel=False)
        manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels, shutdown_wait_time=60.0)
        resources = {"metadata": {"path": str(places["here"])}}
        fresh = copy.deepcopy(notebook)
        NotebookClient(fresh, km=manager, timeout=300, resources=resources).execute(cleanup_kc=True)
        assert psutil.Process().children(recursive=True) == children, "a process was left behind"
        left = [*places["here"].iterdir(), *places["temporary"].glob("tmp*")]  # torch has a cache of its own there
        assert left == [], "files were left behind"
        return fresh

    return run


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestEachNotebook:
    def test_it_is_stored_as_it_was_run(self, path):
        notebook = read(path)
        nbformat.validate(notebook)
        assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
        assert notebook.metadata.kernelspec.name == "python3"
        assert blemishes(notebook) == []
        assert path.stat().st_size < MAX_BYTES

    def test_it_runs_and_shows_what_is_stored(self, path, execute):
        stored = read(path)
        fresh = execute(stored)
        assert list(differences(stored, fresh)) == []
        assert blemishes(fresh) == []
        assert bool(rewards(fresh)) == any(map(is_sampled, code_cells(fresh)))
        assert all(after > before for before, after in rewards(fresh)), rewards(fresh)


def test_there_are_notebooks_and_the_readme_links_to_them():
    assert len(NOTEBOOKS) == 4
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(notebooks)" in readme
    texts = [cell.source for path in NOTEBOOKS for cell in read(path).cells if cell.cell_type == "markdown"]
    links = [target for text in texts for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    assert links
    assert [target for target in links if not (ROOT / "notebooks" / target).exists()] == []


class TestWhatIsLookedFor:
    """The checks themselves, on a notebook that is made worse."""

    @pytest.fixture
    def notebook(self):
        return read(ROOT / "notebooks" / "two_turns.ipynb")

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("/home/somebody/runs", "local path"),
            (str(ROOT), "local path"),
            ("FutureWarning: soon", "warning"),
        ],
    )
    def test_what_a_stored_output_says(self, notebook, text, named):
        code_cells(notebook)[1].outputs.append(nbformat.v4.new_output("stream", name="stdout", text=text))
        assert blemishes(notebook)
        assert all(one.startswith(named) for one in blemishes(notebook))

    def test_what_a_stored_notebook_lacks(self, notebook):
        code_cells(notebook)[2].execution_count = None
        for cell in code_cells(notebook):
            cell.outputs = [one for one in cell.outputs if "image/png" not in one.get("data", {})]
        code_cells(notebook)[0].outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])]
        assert blemishes(notebook) == ["not run in order", "no picture", "error: ValueError"]

    def test_what_has_changed_since(self, notebook):
        changed = copy.deepcopy(notebook)
        cells = {cell.id: cell for cell in code_cells(changed)}
        cells["last"].outputs[0].text = cells["last"].outputs[0].text.replace("0", "1")
        assert list(differences(notebook, changed)) == []
        cells["returns"].outputs[0].text += "and more"
        cells["last"].outputs = []
        assert [one.split(":")[0] for one in differences(notebook, changed)] == ["returns", "last"]
        assert rewards(notebook)
        assert rewards(changed) == []

    def test_a_cell_that_fails(self, execute):
        cells = [nbformat.v4.new_code_cell("1 / 0")]
        with pytest.raises(Exception, match="ZeroDivisionError"):
            execute(nbformat.v4.new_notebook(cells=cells))
