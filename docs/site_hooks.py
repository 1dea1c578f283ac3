"""Hooks of mkdocs: the order of pages, pages outside `docs/`, and import paths.

`bench/RESULTS.md`, `bench/LOG.md`, `bench/notes/*.md`, CONTRIBUTING and CHANGELOG become pages of
the site under their paths in the repository; links between them and `docs/` are rewritten.
"""

from __future__ import annotations

import atexit
import posixpath
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "bench/*.md", "bench/notes/*.md", "bench/results/*")
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside `docs/`."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def site_path(path: str) -> str:
    """Return the path in the site of a path in the repository."""
    return path.removeprefix("docs/")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between `docs/` and the pages outside it."""
    source = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        if not (ROOT / target).exists():
            return link[0]  # mkdocs reports it
        if (ROOT / target).suffix not in (".md", ".csv") and not target.startswith("docs/"):
            return link[0]
        return f"{link[1]}{posixpath.relpath(site_path(target), folder or '.')}{link[3]}"

    return LINK.sub(rewritten, markdown)


def navigation() -> list[Any]:
    """Return the sections and pages of the site in the order of the index."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    sections = [section.partition("\n") for section in index.split("\n## ")[1:]]
    pages = [{title: [link[2] for link in LINK.finditer(body)]} for title, _, body in sections]
    return ["README.md", *pages, {"Project": ["bench/RESULTS.md", "bench/LOG.md", *OUTSIDE[:2]]}]


@event_priority(100)
def on_config(config: Any) -> Any:
    """Give mkdocstrings a copy of the packages as they are imported: three of the folders are
    beside `hetero`, and it follows no links.
    """
    package = Path(tempfile.mkdtemp()) / "hetero"
    atexit.register(shutil.rmtree, package.parent)
    for folder in ("hetero", "backends", "profiler", "solver"):
        to = package if folder == "hetero" else package / folder
        shutil.copytree(ROOT / folder, to, ignore=shutil.ignore_patterns("__pycache__"))
    config.nav = navigation()
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(package.parent)]
    return config
