"""hetero: LLM inference that splits every matmul between the GPU and the NPU of one chip.

Importing is cheap: public names load when they are first used and nothing probes a device.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetero.backends.errors import DeviceError
    from hetero.contexts.service import Service
    from hetero.errors import ModelError, UserError
    from hetero.generation.answer_stats import Stats
    from hetero.generation.llm import LLM
    from hetero.generation.loop import Delta, GenerationResult
    from hetero.generation.sampling import SamplingParams
    from hetero.measuring.profiling import profile_device
    from hetero.placement.planning import plan
    from hetero.profiler.errors import ProfileError
    from hetero.profiler.records import DeviceProfile
    from hetero.runtime.kv.context import Context
    from hetero.solver.errors import PlanError
    from hetero.solver.execution_plan import ExecutionPlan

__version__ = "0.1.0"

_LAZY = {
    "LLM": "hetero.generation.llm",
    "Context": "hetero.runtime.kv.context",
    "DeviceError": "hetero.backends.errors",
    "DeviceProfile": "hetero.profiler.records",
    "ExecutionPlan": "hetero.solver.execution_plan",
    "GenerationResult": "hetero.generation.loop",
    "ModelError": "hetero.errors",
    "Delta": "hetero.generation.loop",
    "PlanError": "hetero.solver.errors",
    "ProfileError": "hetero.profiler.errors",
    "SamplingParams": "hetero.generation.sampling",
    "Service": "hetero.contexts.service",
    "Stats": "hetero.generation.answer_stats",
    "UserError": "hetero.errors",
    "profile_device": "hetero.measuring.profiling",
    "plan": "hetero.placement.planning",
}

__all__ = [
    "LLM",
    "Context",
    "Delta",
    "DeviceError",
    "DeviceProfile",
    "ExecutionPlan",
    "GenerationResult",
    "ModelError",
    "PlanError",
    "ProfileError",
    "SamplingParams",
    "Service",
    "Stats",
    "UserError",
    "plan",
    "profile_device",
]


def __getattr__(name: str) -> Any:
    if name == "Piece":
        warnings.warn("hetero.Piece is hetero.Delta now", DeprecationWarning, stacklevel=2)
        name = "Delta"
    if name not in _LAZY:
        raise AttributeError(f"module 'hetero' has no attribute {name!r}")
    from hetero.backends.host.gc_pause import gc_paused

    with gc_paused():
        return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
