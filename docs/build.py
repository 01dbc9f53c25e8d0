"""Build the documentation as a website: ``python docs/build.py out/docs``. No network; a warning is an error.

Pages come from docs/, notebooks from notebooks/. They are put together in a temporary folder, so that nothing generated
lies among the sources. Links to what is no page (experiments, traces, a README beside its files) become paths.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNLISTED = "unlisted pages"
LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)*)([^)#:\s]+)(#[^)]*)?\)")
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def main(arguments: list[str]) -> int:
    """Build into the folder that is given; return Sphinx's exit code."""
    from sphinx.cmd.build import main as sphinx

    out = Path(arguments[0] if arguments else ROOT / "out" / "docs")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        assemble(source)
        return sphinx(["-W", "--keep-going", "-q", "-b", "html", "-d", f"{folder}/doctrees", str(source), str(out)])


def assemble(source: Path) -> None:
    """Put the pages together in a folder."""
    left_out = shutil.ignore_patterns("__pycache__", "build.py", "*_md.py", "README.md")
    shutil.copytree(ROOT / "docs", source, ignore=left_out)
    (source / "notebooks").mkdir()
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copy(notebook, source / "notebooks")
    # What nobody put into a chapter is listed at the end, where it is found.
    index = source / "index.md"
    text = index.read_text(encoding="utf-8")
    listed = {"index", *re.findall(r"^\w+$", text, re.MULTILINE)}
    unlisted = sorted({page.stem for page in source.glob("*.md")} - listed)
    index.write_text(text.replace(UNLISTED, "\n".join(unlisted)), encoding="utf-8")
    for page in source.rglob("*.md"):
        page.write_text(linked(page, source), encoding="utf-8")


def linked(page: Path, source: Path) -> str:
    """Return a page's text with links that leave the documentation turned into text."""

    def change(found: re.Match[str]) -> str:
        text, up, target, _ = found.groups()
        inside = (page.parent / up / target).resolve()
        if inside.exists() and inside.is_relative_to(source.resolve()) and inside.is_file():
            return found[0]
        return f"{text} (`{target}`)"

    # Every second part is a fenced block of code.
    parts = FENCED.split(page.read_text(encoding="utf-8"))
    return "".join(part if place % 2 else LINK.sub(change, part) for place, part in enumerate(parts))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
