"""`hetero serve` whose engine process is `scripted_engine`: `python -m … serve MODEL …`."""

from __future__ import annotations

import asyncio
from typing import Any

from hetero.start import main

ENGINE = "hetero.serving.engine_process"
_start = asyncio.create_subprocess_exec


async def start(*words: str, **options: Any) -> Any:
    """Start a program, but the engine's stand-in for the engine."""
    own = f"{__package__}.scripted_engine"
    return await _start(*(own if word == ENGINE else word for word in words), **options)


if __name__ == "__main__":
    asyncio.create_subprocess_exec = start  # type: ignore[assignment]
    main()
