"""Actions of the engine besides answers: status, and deleting, saving and restoring contexts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final, Protocol

from hetero.contexts.recent import RecentTexts
from hetero.contexts.service import App, Service
from hetero.errors import UserError
from hetero.serving.messages import Control, GenerateRequest


class MissingError(UserError):
    """An object that does not exist or belongs to another app."""


class ControlTarget(Protocol):
    """The object of an action (`hetero.serving.engine_process.ServingEngine`)."""

    service: Service
    slots: int

    @property
    def requests(self) -> list[GenerateRequest]:
        """Return the requests that are being answered."""

    @property
    def counts(self) -> dict[str, int]:
        """Return how many requests run, and how many wait."""

    def recent_of(self, app: App) -> RecentTexts:
        """Return an app's recent texts."""


def about(engine: ControlTarget) -> dict[str, Any]:
    """Return the facts about model and devices for `Ready`."""
    llm, service = engine.service.llm, engine.service
    return {
        "memory_bytes": service.nbytes,
        "max_seq_len": llm.max_seq_len,
        "context_shift": llm.context.home.ropes is not None,
        "device": llm.devices.mode,
        "gpu": llm.devices.name("gpu"),
        "npu": llm.devices.name("npu"),
        "plan_id": llm.plan.plan_id,
        "notes": list(llm.choice.notes),
        "choice": llm.choice.reason,
        "phases": [x.document() for x in llm.phases],
        "context_memory": service.memory.budget.limit,
        "context_disk": service.disk.limit,
        "contexts_per_app": service.contexts_per_app,
    }


def status(engine: ControlTarget, control: Control) -> dict[str, Any]:
    """Return an app's contexts and recent texts."""
    service = engine.service
    app = service.bound(control.app)
    mine = {request.context for request in engine.requests if request.app == control.app}
    contexts: list[dict[str, Any]] = []
    slots: list[dict[str, Any]] = []
    if app is not None:
        for context in app.contexts():
            switch = context.last_switch
            contexts.append(
                {
                    "id": context.id,
                    "tokens": len(context),
                    "chunks": context.where(),
                    "bytes": context.nbytes(),
                    "last_switch": None if switch is None else asdict(switch),
                    "running": context.id in mine,
                }
            )
        recent = engine.recent_of(app)
        for i, text in enumerate(recent.texts):
            slots.append(
                {
                    "id": i,
                    "tokens": len(text.cached.tokens),
                    "chunks": service.memory.histogram(text.cached.chunks),
                    "bytes": service.memory.nbytes(text.cached.chunks),
                    "used": text.used,
                    "running": i in recent.busy,
                }
            )
    return {
        "contexts": contexts,
        "slots": slots,
        "running": bool(mine),
        "devices": {kind: asdict(usage) for kind, usage in service.work.devices.items()},
    }


def totals(engine: ControlTarget, control: Control) -> dict[str, Any]:  # noqa: ARG001
    """Return the totals of all apps."""
    service, chunks = engine.service, Counter[tuple[str, str]]()
    with service.memory.lock:
        for chunk in service.memory.table:
            if chunk.codes is not None:
                chunks["memory", str(chunk.codes.bits)] += chunk.codes.nbytes
    return {
        "requests": engine.counts,
        "memory": {"used": service.memory.budget.used, "limit": service.memory.budget.limit},
        "disk": {"used": service.disk.used, "limit": service.disk.limit},
        "evictions": dict(service.memory.evictions),
        "chunks": [[*key, nbytes] for key, nbytes in chunks.items()],
        "devices": {kind: asdict(usage) for kind, usage in service.work.devices.items()},
    }


def delete_context(engine: ControlTarget, control: Control) -> dict[str, Any]:
    """Delete a context's text, keys and values from the disk."""
    app = engine.service.bind(control.app)
    context = app.context(control.arguments["context"])
    if context is None:
        return {"tokens": 0}
    tokens = len(context)
    engine.recent_of(app).forget(context.id)
    context.delete()
    return {"tokens": tokens}


def erase_slot(engine: ControlTarget, control: Control) -> dict[str, Any]:
    """Delete a recent text."""
    recent = engine.recent_of(engine.service.bind(control.app))
    return {"tokens": recent.erase(control.arguments["slot"])}


def save_slot(engine: ControlTarget, control: Control) -> dict[str, Any]:
    """Save a recent text as a context that persists."""
    app = engine.service.bind(control.app)
    cached = engine.recent_of(app).texts[control.arguments["slot"]].cached
    if not cached.tokens:
        raise UserError("this slot is empty: there is nothing to save")
    name = control.arguments["context"]
    context = app.context(name) or app.new_context(chat=False, name=name)
    engine.recent_of(app).save(control.arguments["slot"], context)
    return {"tokens": len(context), "bytes": engine.service.memory.nbytes(cached.chunks)}


def restore_slot(engine: ControlTarget, control: Control) -> dict[str, Any]:
    """Restore the text of a context that persists as a recent one."""
    app = engine.service.bind(control.app)
    context = app.context(control.arguments["context"])
    if context is None:
        raise MissingError("there is no such saved slot")
    recent = engine.recent_of(app)
    at = control.arguments["slot"]
    recent.restore(at, context)
    nbytes = engine.service.memory.nbytes(recent.texts[at].cached.chunks)
    return {"tokens": len(context), "bytes": nbytes}


Action = Callable[[ControlTarget, Control], dict[str, Any]]
ACTIONS: Final[dict[str, Action]] = {
    "status": status,
    "totals": totals,
    "delete_context": delete_context,
    "erase_slot": erase_slot,
    "save_slot": save_slot,
    "restore_slot": restore_slot,
}
AT_ONCE: Final = frozenset({"status", "totals"})  # while an answer is made
