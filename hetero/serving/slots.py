"""`/slots` and `/props` as in llama-server, and the data of the page."""

from __future__ import annotations

import re
import secrets
import time
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from hetero.serving.errors import ApiError, missing
from hetero.serving.requests import Request
from hetero.serving.served_models import acquire, models_of
from hetero.serving.state import State

router = APIRouter()
_PARAMS: dict[str, Any] = {  # of a completion, where nothing is given, but for sampling
    "seed": 2**32 - 1,  # which is llama-server's for: any
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "n_predict": 16,
    "stop": [],
    "stream": False,
}


class SlotRequest(Request):
    """The body of `save` and `restore`, and of an `erase` that deletes a saved slot."""

    filename: str = ""


@router.get("/slots")
async def slots(request: HttpRequest, model: str | None = None) -> Response:
    """Return the app's recent texts."""
    state = await acquire(request, model)
    status = await state.engine.control(request.state.app, "status")
    listed = status["slots"] or [{"id": i, "tokens": 0} for i in range(state.slots)]
    for slot in listed:
        slot["n_ctx"] = state.max_seq_len
        slot["is_processing"] = slot.pop("running", False)
    return JSONResponse(listed)


@router.post("/slots/{number}")
async def change_slot(
    number: int,
    action: Literal["save", "restore", "erase"],
    request: HttpRequest,
    body: SlotRequest | None = None,
    model: str | None = None,
) -> Response:
    """Save a recent text under a name, restore it, or erase it.

    To erase with a name is to delete what was saved under it.
    """
    state = await acquire(request, model)
    app: str = request.state.app
    if not 0 <= number < state.slots:
        raise missing("slot")
    name = "" if body is None else body.filename
    if action == "erase" and not name:
        value = await state.engine.control(app, "erase_slot", slot=number)
        return JSONResponse({"id_slot": number, "n_erased": value["tokens"]})
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise ApiError(
            400, "filename is up to 100 letters, digits, `.`, `-` and `_`", param="filename"
        )
    async with state.store.turns.of((app, "slot", name)):
        if action == "erase":
            return await _delete_saved(request, number, name)
        return await _save_or_restore(state, app, number, action, name)


async def _delete_saved(request: HttpRequest, number: int, name: str) -> Response:
    """Delete a saved slot of every model: its text, keys and values are then off the disk."""
    models, app = models_of(request), request.state.app
    store = models.store
    context = await store.disk(store.records.slot, app, name)
    if context is None:
        raise missing("saved slot", "filename")
    tokens = await models.delete_context(app, context)
    await store.disk(store.records.delete_slot, app, name)
    if not tokens:  # a save that failed has left the name
        raise missing("saved slot", "filename")
    return JSONResponse({"id_slot": number, "filename": name, "n_erased": tokens})


async def _save_or_restore(
    state: State, app: str, number: int, action: Literal["save", "restore"], name: str
) -> Response:
    store, start_s = state.store, time.perf_counter()
    context = await store.disk(store.records.slot, app, name)
    if action == "restore" and context is None:
        raise missing("saved slot")
    context = context or secrets.token_hex(16)
    if action == "save":  # before the context is made: without a name it could not be deleted
        await store.disk(store.records.keep_slot, app, name, context)
    value = await state.engine.control(app, f"{action}_slot", slot=number, context=context)
    took_ms = (time.perf_counter() - start_s) * 1e3
    counts = {
        "save": {"n_saved": value["tokens"], "n_written": value["bytes"]},
        "restore": {"n_restored": value["tokens"], "n_read": value["bytes"]},
    }
    return JSONResponse(
        {"id_slot": number, "filename": name, **counts[action]}
        | {"timings": {f"{action}_ms": took_ms}}
    )


@router.get("/props")
async def props(request: HttpRequest, model: str | None = None) -> Response:
    """Return a model's properties."""
    state = await acquire(request, model)
    about = state.engine.about
    tokenizer = state.model.tokenizer
    eos = state.model.eos_ids
    return JSONResponse(
        {
            "default_generation_settings": {
                "n_ctx": state.max_seq_len,
                "params": {**_PARAMS, **state.sampling},
            },
            "total_slots": state.slots,
            "model_alias": state.name,
            "model_path": state.model.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": state.template,
            "bos_token": "" if tokenizer.bos_id is None else state.token_text(tokenizer.bos_id),
            "eos_token": state.token_text(eos[0]) if eos else "",
            "build_info": f"hetero {request.app.version}",
            "hetero": about,
        }
    )


@router.get("/v1/hetero/contexts")
async def contexts(request: HttpRequest, model: str | None = None) -> Response:
    """Return the app's conversations and recent texts, and the devices' work so far.

    Each has its tokens, bits, bytes, and the place of each chunk. A model is not loaded for it.
    """
    models, app = models_of(request), request.state.app
    served = models.find(model)
    state, store = served.state, models.store
    status: dict[str, Any] = {"contexts": [], "slots": [], "running": False, "devices": {}}
    loaded = models.look(served, request.state.leases)
    if loaded:
        status = await state.engine.control(app, "status")
    listed = await store.disk(store.records.conversations, app)
    known = {context["id"]: context for context in status["contexts"]}
    status["conversations"] = [
        known.pop(name.removeprefix("conv_"), {"tokens": 0, "chunks": {}, "bytes": 0})
        | {"id": name, "title": title}
        for name, title in listed
    ]
    status["saved_slots"] = list(known.values())
    del status["contexts"]
    status["model"] = state.name
    status["models"] = [{"id": x.name, "status": x.status} for x in models.served]
    status["placement"] = state.engine.about["choice"] if loaded else ""
    status["now_s"] = time.time()
    return JSONResponse(status)
