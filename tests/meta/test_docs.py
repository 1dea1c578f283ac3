"""The documentation: sizes of pages, links, names that exist, the drawing."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetero
from hetero.cli.commands import COMMANDS

pytestmark = pytest.mark.few(10_000)  # every page by default: they are quick

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hetero", "backends", "profiler", "solver")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECORDS = [ROOT / "CHANGELOG.md", *sorted((ROOT / "bench").rglob("*.md"))]
GENERATED = ROOT / "docs" / "demo-model" / "samples.md"  # stories as the model wrote them
MAX_LINES = {"README.md": 150}
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*\.(py|cl|toml|yaml|md)")
CLASS = re.compile(r"([A-Z][a-z]+[A-Za-z]*)(\.\w+)*")
DIALECT = re.compile(
    r"\b(anew|asunder|beside|doubted|foreseen|nobody|told|untold|whoever|goes on|no more use)\b",
    flags=re.IGNORECASE,
)
# Classes and operators of other programs.
FOREIGN = {"Field", "OrtDevice", "OrtValue"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The text of a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs make it."""
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower())
    return re.sub(r"[\s-]+", "-", plain.strip())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_short(page: Path) -> None:
    lines, most = page.read_text("utf-8").count("\n"), MAX_LINES.get(name_of(page), 200)
    assert lines <= most, f"{name_of(page)} has {lines} lines, of at most {most}: split it"


def may_be_wide(page: Path, line: str) -> bool:
    """Whether a line is a story, or a table's row or a command of a dated note."""
    note = page.parent.name == "notes" and re.match(r"\||\(?`[^`]*`\W?$", line)
    return page == GENERATED or bool(note)


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=name_of)
def test_a_page_is_narrow(page: Path) -> None:
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if not may_be_wide(page, line):
            assert len(line) <= 100, f"{name_of(page)}:{number} has {len(line)} columns, not 100"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_uses_the_words_of_the_field(page: Path) -> None:
    quoted = re.compile(r"`[^`]*`|^>.*$|#.*$", flags=re.MULTILINE)
    words = [] if page == GENERATED else DIALECT.findall(quoted.sub("", prose(page)))
    assert words == [], f"{name_of(page)}: say it as llama.cpp, vLLM or CUDA would"


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        path, _, fragment = link.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", prose(target), flags=re.MULTILINE)
            assert fragment in {anchor(x) for x in headings}, f"{name_of(page)} links to {link}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs/reference").glob("paper-*.md")), ids=name_of)
def test_commands_of_the_papers_pages_exist(page: Path) -> None:
    """Commands of benches are parsed by `test_bench`."""
    helped = (ROOT / "tests" / "cli" / "help.txt").read_text("utf-8").split("Usage: hetero ")
    known = {text.split(" ")[0]: text for text in helped if text}
    listed = re.findall(r"`hetero ([a-z-]+)([^`]*)`", page.read_text("utf-8"))
    assert listed
    for name, rest in listed:
        for option in re.findall(r"--[a-z-]+", rest):
            assert re.search(rf"{option}\b", known[name]), f"hetero {name}{rest}"


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(prose(index))
    }
    kinds = ("tutorial", "howto", "reference", "explanation")
    pages = {page for kind in kinds for page in (ROOT / "docs" / kind).rglob("*.md")}
    assert {name_of(page) for page in pages - linked} == set()


def test_the_api_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text("utf-8")
    documented = re.findall(r"^::: hetero\.(\w+)$", text, flags=re.MULTILINE)
    assert sorted(documented) == sorted(set(hetero.__all__) - {"__version__"})


def test_the_reference_has_every_command() -> None:
    text = (ROOT / "docs" / "reference" / "commands.md").read_text("utf-8")
    missing = [name for name in COMMANDS if not re.search(rf"`{name}[ `]", text)]
    assert missing == []


@pytest.mark.full  # imports the server
def test_the_reference_has_every_path_of_the_server() -> None:
    """`…` in a list stands for the last path that is written out; capitals for a parameter."""
    pytest.importorskip("fastapi")
    from hetero.serving.http_app import _ROUTERS

    text = (ROOT / "docs" / "reference" / "http-api.md").read_text("utf-8")
    section = text.partition("\n## Endpoints\n")[2].partition("\n## ")[0]
    listed, last = set[str](), ""
    for path in re.findall(r"`(?:[A-Z]+ )?([/…][^`\s?]*)[^`]*`", section):
        whole = path.replace("…", last)
        last = path if path.startswith("/") else last
        listed.add(re.sub(r"/[A-Z]+\b", "/{}", whole))
    routes = [route for router in _ROUTERS for route in router.routes]
    served = {re.sub(r"{.*?}", "{}", getattr(route, "path", "")).rstrip("/") for route in routes}
    assert listed ^ served == {"/openapi.json"}, "FastAPI's own; the others are in both or missing"


def test_the_reference_has_every_variable_of_the_environment() -> None:
    text = (ROOT / "docs" / "reference" / "environment.md").read_text("utf-8")
    read = {
        name
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\"(HETERO_[A-Z_]+)\"", path.read_text("utf-8"))
    }
    macro = "HETERO_KERNELS"  # of OpenCL programs
    assert {name for name in read - {macro} if name not in text} == set()


@functools.cache
def words() -> frozenset[str]:
    """Every word of the code."""
    files = [
        path for folder in (*PACKAGES, "tests", "bench") for path in (ROOT / folder).rglob("*.py")
    ]
    return frozenset(w for path in files for w in re.findall(r"\w+", path.read_text("utf-8")))


@functools.cache
def files() -> frozenset[str]:
    """Every file of the repository by each end of its path: `a/b.py`, `b.py`."""
    tracked = [
        path.relative_to(ROOT).parts
        for folder in (*PACKAGES, "tests", "bench", "docs")
        for path in (ROOT / folder).rglob("*.*")
    ]
    tops = [(path.name,) for path in ROOT.iterdir()]
    return frozenset("/".join(p[i:]) for p in [*tracked, *tops] for i in range(len(p)))


def spans(page: Path) -> Iterator[str]:
    for span in SPAN.findall(prose(page)):
        yield span.removeprefix("python ").split(" ")[0].split("::")[0]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_in_a_page_exist(page: Path) -> None:
    """A file or a class that was renamed or removed is named by no page."""
    unknown = []
    for span in spans(page):
        if FILE.fullmatch(span) and "NAME" not in span:
            unknown += [span] if span not in files() else []
        elif (match := CLASS.fullmatch(span)) and "." in span and match[1] not in FOREIGN:
            unknown += [span] if not set(span.split(".")) <= words() else []
    assert unknown == [], f"{name_of(page)} names what does not exist"


def test_the_way_names_what_the_code_has() -> None:
    page = ROOT / "docs" / "howto" / "find-your-way.md"
    own = (span for span in spans(page) if "NAME" not in span)
    names = {x for x in own if re.fullmatch(r"@?[A-Za-z_.]*[A-Z_][A-Za-z_]*", x)}
    assert len(names) > 15
    assert {x for name in names for x in re.findall(r"\w+", name)} - words() == set()


@pytest.mark.full
def test_the_drawing_of_the_packages_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "draw_packages.py"), "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
