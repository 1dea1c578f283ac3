"""Tools of a request: functions, and which of them may or must be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hetero.serving.errors import ApiError

_NOT_SHOWN: Final = ("type", "strict", "defer_loading", "allowed_callers", "output_schema")


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, as OpenAI's `function` objects.

    `forced`: an answer is a call, `named`: of the one function that is allowed. `silent`: no call
    is made. `allowed` are the names of those that may be called (empty: all), `namespaces` the
    group of each function that is in one. `strict`: arguments obey their schemas even where the
    model chooses to call. Without `parallel` an answer has one call.
    """

    functions: tuple[dict[str, Any], ...] = ()
    forced: bool = False
    named: bool = False
    strict: bool = False
    parallel: bool = True
    silent: bool = False
    allowed: frozenset[str] = frozenset()
    namespaces: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the functions that may be called."""
        return self.allowed or frozenset(f["name"] for f in self.functions)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of the functions that may be called, by name."""
        if self.silent:
            return {}
        named = [f for f in self.functions if f["name"] in self.names]
        return {f["name"]: f.get("parameters") or {} for f in named}

    @property
    def constrains(self) -> bool:
        """Return whether an answer needs a grammar."""
        return bool(self.schemas) and (self.forced or self.strict or not self.parallel)


def tool_use(
    tools: Sequence[dict[str, Any]] | None, choice: Any, *, parallel: bool | None = True
) -> ToolUse:
    """Parse `tools`, `tool_choice` and `parallel_tool_calls` as chat completions have them.

    Tools that are no functions (a search on the web, a shell, grammars of calls) cannot run here:
    they are left out, as by other local servers. Raises `ApiError`.
    """
    functions, namespaces = list[dict[str, Any]](), dict[str, str]()
    strict = False
    for i, tool in enumerate(tools or ()):
        inner = tool.get("function")
        strict = strict or (isinstance(inner, dict) and inner.get("strict") is True)
        if tool.get("type") == "namespace":
            named = [
                _function({"function": x, **x}, f"tools.{i}")
                for x in tool.get("tools") or ()
                if isinstance(x, dict) and x.get("type") == "function"
            ]
            namespaces |= {f["name"]: str(tool.get("name", "")) for f in named}
            functions += named
        elif tool.get("type") == "function":
            functions.append(_function(tool, f"tools.{i}"))
    names = frozenset(f["name"] for f in functions)
    mode, wanted = _choice(choice)
    if unknown := sorted(wanted - names):
        raise ApiError(
            400, f"tool_choice names no function of `tools`: {unknown[0]!r}", param="tool_choice"
        )
    if mode == "required" and not functions:
        raise ApiError(400, "tool_choice `required` needs a function", param="tool_choice")
    return ToolUse(
        tuple(functions),
        forced=mode == "required",
        named=mode == "required" and len(wanted or names) == 1,
        strict=strict,
        parallel=parallel is not False,
        silent=mode == "none",
        allowed=wanted,
        namespaces=namespaces,
    )


def _function(tool: dict[str, Any], param: str) -> dict[str, Any]:
    """Return a function as templates show it. Raises `ApiError`."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "a function has a name", param=param)
    if not isinstance(function.get("parameters", {}) or {}, dict):
        raise ApiError(400, "a tool's parameters are a JSON schema", param=param)
    return {name: value for name, value in function.items() if name not in _NOT_SHOWN}


def _choice(choice: Any) -> tuple[str, frozenset[str]]:
    """Return the mode (`auto`, `none`, `required`) and the names (empty: all) of `tool_choice`.

    Raises `ApiError`.
    """
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            inner = choice.get("allowed_tools", choice)  # of chat completions, of responses
            inner = inner if isinstance(inner, dict) else {}
            allowed = [_named(tool) for tool in inner.get("tools") or () if isinstance(tool, dict)]
            mode, names = inner.get("mode", "auto"), frozenset(filter(None, allowed))
        else:
            mode, names = "required", frozenset([_named(choice)])
            if "" in names:
                raise ApiError(
                    400,
                    f"tool_choice of type {str(choice.get('type'))[:40]!r} names no function: "
                    "only functions are called here",
                    param="tool_choice",
                )
    else:
        mode, names = choice or "auto", frozenset[str]()
    if mode not in ("auto", "none", "required"):
        raise ApiError(
            400,
            "tool_choice is auto, none, required, a function or allowed_tools",
            param="tool_choice",
        )
    return mode, names


def _named(tool: dict[str, Any]) -> str:
    """Return the name of a function in the form of either API; empty for other kinds of tools."""
    inner = tool.get("function", tool)
    name = inner.get("name") if isinstance(inner, dict) else None
    return str(name or "")
