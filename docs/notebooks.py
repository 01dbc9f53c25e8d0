"""Execute the notebooks: ``python docs/notebooks.py [--check] [NAME ...]`` (``make notebooks``).

Sources are notebooks/*.py, in jupytext's percent format. Beside each is an .ipynb with the outputs of its last run and
the hash of the source that made them. With ``--check`` nothing is written, and what differs is told: another source, or
another text among the outputs. Of pictures only that there is one is compared.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
SOURCE = "vtoken_source_sha256"


def main(arguments: list[str]) -> int:
    """Execute; return 1 if anything differs from what is there."""
    import nbformat

    names = [each for each in arguments if not each.startswith("-")]
    bad = 0
    for source in sorted(FOLDER.glob("*.py")):
        if names and source.stem not in names:
            continue
        made = executed(source)
        committed = source.with_suffix(".ipynb")
        if "--check" not in arguments:
            nbformat.write(made, committed)
            print(committed)
            continue
        for line in differences(made, nbformat.read(committed, as_version=4)):
            bad = 1
            print(f"{committed.name}: {line}")
    return bad


def executed(source: Path) -> Any:
    """Return the notebook of a source with its outputs."""
    import jupytext
    from nbclient import NotebookClient

    notebook = jupytext.read(source)
    where = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=600, coalesce_streams=True, resources=where).execute()
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata.clear()
        if cell.cell_type == "code":
            # What a library says on standard error depends on the machine.
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        SOURCE: hashlib.sha256(source.read_bytes()).hexdigest(),
    }
    return notebook


def differences(made: Any, committed: Any) -> list[str]:
    """Return what differs between a run and what is committed."""
    found = []
    if made.metadata[SOURCE] != committed.metadata.get(SOURCE):
        found.append("its outputs are of another source: run `make notebooks`")
    if len(made.cells) != len(committed.cells):
        return [*found, "it has other cells"]
    for number, (new, old) in enumerate(zip(made.cells, committed.cells, strict=True)):
        if new.source != old.source:
            found.append(f"cell {number} has another source")
        if told(new) != told(old):
            found.append(f"cell {number} says something else:\n{told(new)}\n  and not\n{told(old)}")
    return found


def told(cell: Any) -> list[str]:
    """Return the texts of a cell's outputs; a picture is the word."""
    texts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        texts.append("picture" if "image/png" in data else output.get("text") or data.get("text/plain", ""))
    return [re.sub(r" at 0x[0-9a-f]+", "", text) for text in texts]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
