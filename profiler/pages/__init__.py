"""Pages of reports: one skeleton, one style and one set of colours, filled in by Jinja.

A page is one file that asks for nothing else: no scripts, nothing from a network, readable at the
width of a phone and without a mouse.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup

# Okabe and Ito's palette, safe for the colour-blind; a device has its colour everywhere.
COLORS: Final[dict[str, str]] = {
    "gpu": "#0072B2", "npu": "#D55E00", "cpu": "#CC79A7", "both": "#009E73", "rest": "#9AA1A9",
}  # fmt: skip
LINES: Final = (
    "#56B4E9", "#CC79A7", "#8C6D00", "#7A5195", "#5C5C5C", "#3B8686", "#B0A8D0", "#A5682A",
    "#9FB8AD", "#C99DB0",
)  # fmt: skip


def render(template: str, **values: Any) -> str:
    """Return a page of the folder `profiler/pages`; `values` are text, unless they are `Markup`."""
    return _environment().get_template(template).render(colors=COLORS, **values)


def markup(svg: str) -> Markup:
    """Return a drawing of ours unescaped."""
    from markupsafe import Markup  # as Jinja, of which it is a part

    return Markup(svg)


@cache
def _environment() -> jinja2.Environment:
    import jinja2  # heavy, and only pages need it

    folder = resources.files("hetero.profiler") / "pages"

    def load(name: str) -> str | None:
        file = folder / name
        return file.read_text(encoding="utf-8") if file.is_file() else None

    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(load),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["before_colon"] = lambda said: said.partition(":")[0]
    made.filters["after_colon"] = lambda said: said.partition(":")[2]
    return made
