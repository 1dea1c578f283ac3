"""Charts of reports: matplotlib figures as SVG text. No display is needed."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from hetero.profiler.pages import markup

SIZE_INCHES: Final = (4.6, 3.3)
STYLE: Final[Any] = {  # typed loosely: matplotlib lists every key as a literal
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.constrained_layout.use": True,
}


class Chart(NamedTuple):
    """A chart and what a reader should see in it."""

    title: str
    note: str
    svg: Markup


@contextmanager
def own_style() -> Iterator[None]:
    """Yield with a style in which neither the directory's nor the user's matplotlibrc counts.

    Least of all LaTeX.
    """
    own: Any = {key: value for key, value in mpl.rcParamsDefault.items() if key != "backend"}
    with mpl.rc_context(own):
        yield


def new_axes(height: float = SIZE_INCHES[1]) -> Axes:
    """Return the axes of a new figure, by this module's style."""
    with mpl.rc_context(STYLE):
        return Figure(figsize=(SIZE_INCHES[0], height)).add_subplot()


def log_log(axes: Axes, x: str, y: str) -> None:
    """Make the axes logarithmic, with plain numbers."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def svg_of(axes: Axes, title: str) -> Markup:
    """Return SVG text that scales with its place; identifiers differ from chart to chart."""
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)
    buffer = io.StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\s(width|height|xmlns:xlink|version)="[^"]*"', "", opening)
    opening = opening.replace("<svg", f'<svg role="img" aria-label="{title}"')
    prefix = re.sub(r"\W+", "-", title.lower())
    # Identifiers such as figure_1 or axes_1 are the same in every matplotlib figure.
    rest = re.sub(r'\bid="', f'id="{prefix}-', rest)
    rest = re.sub(r'xlink:href="#', f'href="#{prefix}-', rest)
    rest = rest.replace("url(#", f"url(#{prefix}-")
    return markup(f"{opening}>{rest}")
