"""Times the preparation of steps of a new length: lowering, binding and fusing them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from hetero.runtime.step import Step
from hetero.runtime.step_cache import StepCache


@dataclass
class Preparing:
    """Seconds so far, of the control thread."""

    seconds: float = 0.0


@contextmanager
def preparing() -> Iterator[Preparing]:
    """Count inside: nearly every call has a new length, wherever its context is."""
    spent = Preparing()

    def counted(method: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                spent.seconds += time.perf_counter() - start_s

        return run

    with ExitStack() as patched:
        for owner, name in ((StepCache, "_lower"), (Step, "_bound"), (Step, "fused")):
            patched.enter_context(patch.object(owner, name, counted(getattr(owner, name))))
        yield spent
