"""The process that renders chat templates: nothing but Jinja and the standard library.

Started as a script by `hetero.models.template_sandbox`. It reads one JSON request per line and
answers with one JSON line: {"text": …}, or {"error": …, "kind": "syntax" | "refused" | "limit"}.
The limits on memory are set before the first template is read; the parent enforces the time limit.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY_BYTES: Final = 512 << 20
MAX_TEXT_CHARACTERS: Final = 8 << 20

_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)


class _Generation(Extension):
    """The tag `{% generation %} … {% endgeneration %}` around the model's words; a no-op."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON; unlike Jinja's own filter, it leaves <, > and & alone."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _text(source: str, values: dict[str, Any], now: str) -> str:
    """Return the rendered text. Raises `MemoryError` for one that is too long."""
    time = datetime.fromisoformat(now)
    values["strftime_now"] = time.strftime
    chunks: list[str] = []
    length = 0
    for chunk in _compile(source).generate(values):
        length += len(chunk)
        if length > MAX_TEXT_CHARACTERS:
            raise MemoryError
        chunks.append(chunk)
    return "".join(chunks)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return the answer to one request."""
    try:
        return {"text": _text(request["source"], request["values"], request["now"])}
    except jinja2.TemplateSyntaxError as error:
        return {"kind": "syntax", "error": str(error)}
    except RecursionError:
        return {"kind": "limit", "error": "it nests too deeply"}
    except (MemoryError, OverflowError):
        return {"kind": "limit", "error": "its text or its values grow too large"}
    except _REFUSALS as error:
        return {"kind": "refused", "error": str(error)}


def limit_memory() -> None:
    """Limit the address space to `MAX_MEMORY_BYTES`, where the system can.

    Elsewhere (Windows, macOS) the parent's clock and the text's limit remain.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    for name, most in (("RLIMIT_AS", MAX_MEMORY_BYTES), ("RLIMIT_CORE", 0)):
        # macOS refuses the first; a lower limit that is set already cannot be raised
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (most, most))


def requests() -> Iterator[dict[str, Any]]:
    """Yield requests until the parent closes the pipe."""
    for line in sys.stdin.buffer:
        yield json.loads(line)


def main() -> None:
    """Report that all is imported, then answer requests."""
    limit_memory()
    print("ready", flush=True)
    for request in requests():
        print(json.dumps(answer(request)), flush=True)


if __name__ == "__main__":
    main()
