"""pyopencl's generated code for a kernel object, generated once for all kernels of a name.

For each `cl.Kernel` it writes and compiles two Python functions, which set the arguments and
enqueue the kernel. They are the same for all kernels of a name and argument count, are not used
here (`OpenCLCall` sets its arguments once), and cost more than all else that binding a launch does:
1.7 of 1.8 ms, for every launch of every token count that is new. The source of each would be kept
for tracebacks as well, for ever.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

from pyopencl import invoker


def share_invokers() -> None:
    """Let pyopencl take the functions that it made before; idempotent."""
    made = invoker.generate_enqueue_and_set_args
    if not hasattr(made, "shared"):
        invoker.generate_enqueue_and_set_args = _Shared(made)


class _Shared:
    """`generate_enqueue_and_set_args` with memory."""

    shared = True

    def __init__(self, made: Callable[..., Any]) -> None:
        self._made = made
        self._known: dict[str, Any] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the two functions.

        `devs` only decide on a warning, which the first kernel gives.
        """
        key = repr((args[:6], {name: x for name, x in options.items() if name != "devs"}))
        if key not in self._known:
            self._known[key] = self._made(*args, **options)
            _forget_sources()
        return self._known[key]


def _forget_sources() -> None:
    """Drop the sources that are kept for tracebacks, each under a name of its own."""
    for name in [x for x in linecache.cache if x.startswith("<generated: 'pyopencl invoker")]:
        del linecache.cache[name]
