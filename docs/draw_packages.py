"""Draw the packages of hetero and what they import: `python docs/draw_packages.py [--check]`.

Writes `docs/pictures/packages.svg`, or exits with 1 where it is not what the imports give. A
package is drawn below all that import it; an arrow that follows from two others is left out.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "packages.svg"
BESIDE = ("backends", "profiler", "solver")  # folders beside `hetero`, imported as `hetero.NAME`
WIDTH, BOX, HEIGHT, GAP = 920, 220, 52, 44
ABOUT = {
    "backends": "devices behind one protocol",
    "profiler": "timings, predictors, cost model",
    "terminal": "tables, notices, safe printing",
    "solver": "tilings, layer DP, plans",
    "models": "files, tokenizers, model graph",
    "runtime": "kernels, steps, KV cache",
    "placement": "which device computes what",
    "compiling": "quantisation, NPU graphs",
    "generation": "hetero.LLM: sampling, stopping",
    "contexts": "hetero.Service: kept contexts",
    "measuring": "bench, eval, profile",
    "serving": "HTTP server and its engine",
    "cli": "the commands",
}

Graph = dict[str, set[str]]


def packages() -> dict[str, Path]:
    """Return the folder of every package directly below `hetero`."""
    inside = {path.parent.name: path.parent for path in (ROOT / "hetero").glob("*/__init__.py")}
    return inside | {name: ROOT / name for name in BESIDE}


def imports(folder: Path) -> set[str]:
    """Return the packages that the modules of a folder import, also inside functions and for type
    checking only.
    """
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("hetero.")}


def graph() -> Graph:
    """Return what each package imports."""
    folders = packages()
    return {name: imports(path) & folders.keys() - {name} for name, path in folders.items()}


def below(edges: Graph, name: str) -> set[str]:
    """Return all that a package reaches."""
    reached: set[str] = set()
    for target in edges[name]:
        reached |= {target} | below(edges, target)
    return reached


def reduced(edges: Graph) -> Graph:
    """Return the graph without the arrows that follow from others."""
    return {
        name: {t for t in targets if not any(t in below(edges, other) for other in targets)}
        for name, targets in edges.items()
    }


def levels(edges: Graph) -> list[list[str]]:
    """Return the packages by the length of the longest way down, lowest first."""
    depth: dict[str, int] = {}

    def visit(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((visit(target) for target in edges[name]), default=-1)
        return depth[name]

    rows: list[list[str]] = [[] for _ in range(1 + max(visit(name) for name in edges))]
    for name in sorted(edges):
        rows[depth[name]].append(name)
    return rows


def draw() -> str:
    """Return the drawing as SVG."""
    edges = graph()
    rows = levels(edges)
    place = {
        name: ((i + 1) * WIDTH // (len(row) + 1), (len(rows) - 1 - y) * (HEIGHT + GAP) + 10)
        for y, row in enumerate(rows)
        for i, name in enumerate(row)
    }
    lines, boxes = [], []
    for name, targets in sorted(reduced(edges).items()):
        x, y = place[name]
        for target in sorted(targets):
            to_x, to_y = place[target]
            start, middle = y + HEIGHT, (y + HEIGHT + to_y) // 2
            lines.append(
                f'<path d="M{x} {start} C{x} {middle} {to_x} {middle} {to_x} {to_y - 6}" '
                'class="arrow" marker-end="url(#head)"/>'
            )
        boxes.append(
            f'<rect x="{x - BOX // 2}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="6"/>'
            f'<text x="{x}" y="{y + 22}" class="name">{name}</text>'
            f'<text x="{x}" y="{y + 41}" class="about">{ABOUT[name]}</text>'
        )
    height = len(rows) * (HEIGHT + GAP) - GAP + 20
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" text-anchor="middle">',
        "<style>rect{fill:#eef3fb;stroke:#4a6fa5}.arrow{fill:none;stroke:#8a97ab}"
        ".name{font-size:15px;font-weight:bold}.about{font-size:11px;fill:#444}</style>",
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="4" refY="4" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#8a97ab"/></marker></defs>',
        '<rect width="100%" height="100%" style="fill:#fff;stroke:none"/>',
        *lines, *boxes, "</svg>\n",
    ])  # fmt: skip


def main() -> None:
    """Write the drawing, or check it."""
    text = draw()
    if sys.argv[1:] == ["--check"]:
        if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != text:
            sys.exit(f"{PICTURE.relative_to(ROOT)} is not current: python docs/draw_packages.py")
        return
    PICTURE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
