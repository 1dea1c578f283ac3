"""`Service`: one model for many applications, whose contexts persist.

Paper's words (LLMS, section 3.1): `bind` is bindLLMService, `new_context` newLLMCtx, `call`
callLLM, `delete` delLLMCtx. The service knows nothing of HTTP.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from hetero.arguments import check_count, check_one_of, parse_size
from hetero.backends.host.closing import Closing
from hetero.backends.host.files import sync_directory
from hetero.backends.host.signals import WholeSteps, whole
from hetero.contexts.budget import ByteBudget
from hetero.contexts.chunk_files import ChunkFiles
from hetero.contexts.chunk_memory import ChunkMemory
from hetero.contexts.chunks import chained_key, end_keys
from hetero.contexts.codec import ChunkCodec, codec_of
from hetero.contexts.compaction import compact, make_room
from hetero.contexts.compression import Compression, KvBits
from hetero.contexts.decoding import ChunkDecoder, SharedDecoder, decoders
from hetero.contexts.directory import ServiceDirectory
from hetero.contexts.encryption import vault_of
from hetero.contexts.eviction import Policy
from hetero.contexts.head_bits import with_head_bits
from hetero.contexts.measured import (
    MEASURES,
    SAMPLE_TEXT,
    measure_channels,
    measure_chunks,
    measure_disk,
    measure_load,
    measure_prompts,
    measure_run,
    rates_of,
)
from hetero.contexts.prompt_times import predict_prompts
from hetero.contexts.ratios import Rule
from hetero.contexts.read_ahead import ReadAhead
from hetero.contexts.service_lock import WAIT_S, ServiceLock
from hetero.contexts.slot_pool import Slot, SlotPool
from hetero.contexts.snapshots import StatefulWorkingSet
from hetero.contexts.swap_out import SwapOut, When
from hetero.contexts.text_log import Text, TextLog
from hetero.contexts.unbound import UnboundApps
from hetero.contexts.working_set import CachedText, CallTimes, Switch, WorkingSet
from hetero.errors import QuotaError, UserError
from hetero.generation.conversation import Conversation
from hetero.generation.llm import LLM
from hetero.generation.loop import Delta, Generation, GenerationResult, Pending, decode_together
from hetero.runtime.filling import recover, scatters
from hetero.runtime.kv.attention_stats import ScoreStats
from hetero.runtime.kv.constants import SINKS
from hetero.runtime.kv.context import Context
from hetero.runtime.kv.kv_cache import CacheLayout
from hetero.runtime.usage import Work, total


class Service(Closing):
    """A model and the contexts of its applications, in a folder.

    `model` is what `LLM` takes, with `LLM`'s options, or an open `LLM`. `context_memory` bounds the
    keys and values in memory of all contexts of all apps, without the one cache that the devices
    compute in; `context_disk` bounds the folder; `contexts_per_app` is the most that an app may
    have. `kv_bits` is the format of keys and values: `mixed` (`kv_ratio` of the bytes of 8 bits;
    each layer has the bits that cost least, which is measured once for a folder), 16 (float16), 8,
    4, 2, or `raw` (float32, exact).

    The folder is encrypted with `encryption_key`: 32 bytes, or a file that has them (default:
    HETERO_ENCRYPTION_KEY of the environment, if set). It is then needed to open the folder again.

    Between two calls chunks of the contexts used last are read into that memory (`read_ahead`).
    `eviction`, `swap` and `recompute` are for comparisons (`bench/lab/managers.py`).

    One call runs at a time; calls of other threads wait up to `wait_s` seconds. With `parallel`
    above 1 one thread may run that many streams, each in a cache of its own where the memory budget
    has room for it, and `decode_together` computes the next token of all of them in one step.
    Signal handlers that raise (Ctrl-C) do so between two steps of an answer, never inside one. A
    context manager. Raises `UserError` for a folder that is in use, of another model, or unusable.
    """

    def __init__(
        self,
        model: str | LLM,
        *,
        directory: str | os.PathLike[str],
        context_memory: str | int = "256MiB",
        context_disk: str | int = "4GiB",
        contexts_per_app: int = 8,
        kv_bits: KvBits = "8",
        kv_ratio: float = 0.5,
        kv_rule: Rule = "layers",
        eviction: Policy = "lctru",
        swap: When = "ahead",
        recompute: bool = True,
        read_ahead: bool = True,
        wait_s: float = WAIT_S,
        parallel: int = 1,
        encryption_key: str | os.PathLike[str] | bytes | None = None,
        **options: Any,
    ) -> None:
        check_count("parallel", parallel)
        self.contexts_per_app = check_count("contexts_per_app", contexts_per_app)
        self.compression = Compression(kv_bits, kv_ratio, kv_rule)
        check_one_of("eviction", eviction, get_args(Policy))
        check_one_of("swap", swap, get_args(When))
        self._vault = vault_of(encryption_key)
        self._owns = not isinstance(model, LLM)
        self.llm = _model(model, options)
        self._lock = ServiceLock(wait_s, joins=parallel > 1)
        self._closers = ExitStack()
        opened = self._closers.enter_context
        if self._owns:
            self._closers.callback(self.llm.close)
        try:
            self._active = opened(closing(self.llm.new_context()))
            self._directory = opened(closing(self._opened(Path(directory))))
            codec, decoder = self._measured()
            memory = _chunk_budget(context_memory, codec.workspace_bytes)
            self.disk = ByteBudget(parse_size(context_disk), "context_disk")
            self._unbound = UnboundApps(self._directory.path / "apps", self.disk)
            self.memory = ChunkMemory(memory, eviction)
            swapping = SwapOut(self.memory, codec, self._files, self.disk, self._unbound, when=swap)
            self.swap = opened(closing(swapping))
            self._codec = codec
            slot = partial(
                self._slot, decoder=SharedDecoder(decoder), times=CallTimes(),
                rates=self._directory.read(rates_of), recompute=recompute,
            )  # fmt: skip
            first = slot(self._active)
            self._working = opened(closing(first.working))
            slots = SlotPool(first, lambda: slot(self.llm.new_context()), parallel)
            self._slots = opened(closing(slots))
            self._apps: dict[str, App] = {}
            self.ahead = self._reading_ahead() if read_ahead else None
        except BaseException:
            self.close()
            raise

    def _reading_ahead(self) -> ReadAhead:
        """Return the thread that reads between calls, which pause it."""
        cached = partial(map, attrgetter("working.cached_time"), self._slots)
        ahead = ReadAhead(self.memory, self._codec, self._files, self.swap, cached)
        self._lock.idle_work = self._closers.enter_context(closing(ahead))
        return ahead

    def _slot(self, active: Context, **options: Any) -> Slot:
        """Return a slot that streams on a context; `options` are those of its working set."""
        if self.compression.ranks:
            active.score_stats = ScoreStats(self.llm.max_seq_len)
        kind = StatefulWorkingSet if active.cache.layout.states else WorkingSet
        working = kind(
            active,
            self.memory,
            self._codec,
            self.swap,
            files=self._files,
            **options,
        )
        return Slot(active, working)

    @whole
    def bind(self, app: str) -> App:
        """Return an application by its name; its contexts of earlier processes are there."""
        if not isinstance(app, str) or not app:
            raise UserError(f"an app's name must be a text that is not empty, got {app!r}")
        with self._lock.taken():
            if app not in self._apps:
                folder, root = self._directory.app(app), self._directory.root(app)
                files = ChunkFiles(folder, self._codec, self.disk, self._vault)
                bound = App(self, app, root, folder, files)
                self.swap.drain()  # so that what is taken meanwhile is this one's
                self._unbound.bind(folder)
                before = self.disk.used
                self._apps[app] = bound
                try:
                    bound._open_all()
                except BaseException:
                    del self._apps[app]
                    self.disk.give(self.disk.used - before)
                    self._unbound.unbind(folder)
                    raise
            return self._apps[app]

    def bound(self, app: str) -> App | None:
        """Return an application that `bind` has opened."""
        return self._apps.get(app)

    @property
    def work(self) -> Work:
        """Return the devices' work for all calls."""
        return total(slot.active.work for slot in self._slots)

    @property
    def nbytes(self) -> int:
        """Return the memory that the model, all streams' caches and kept contexts take at most."""
        needs = replace(self.llm.engine.memory, contexts=self._slots.max_slots)
        return needs.total_bytes + self.memory.budget.limit

    def room(self) -> bool:
        """Return whether this thread can begin another stream."""
        return self._slots.room()

    def decode_together(self, on_device_busy: Callable[[], object] = lambda: None) -> None:
        """Compute the next token of all running streams in as few device steps as possible.

        Reading a stream then gives its token. `on_device_busy` is called once while the devices
        compute: it may read on in streams whose last item is `PENDING`.
        """
        decode_together(self.llm.engine, self._slots.answers(), on_device_busy)

    @whole
    def warm(self) -> None:
        """Allocate what streams that run together need, so that none of them waits for it."""
        with ExitStack() as stack, self._lock.taken(), suppress(UserError):
            engine = self.llm.engine
            contexts = [
                stack.enter_context(engine.new_context())
                for _ in range(min(self._slots.max_slots, engine.max_rows))
            ]
            with engine.lock:
                engine.deployment.warm_rows(contexts)

    @whole
    def close(self) -> None:
        """Write what is left to write, close model and folder; idempotent.

        Waits for another thread's call, and raises `UserError` where that does not end.
        """
        self._lock.end()
        if not self._lock.lost:
            self._closers.close()

    def _files(self, app: str) -> ChunkFiles:
        return self._apps[app].files

    def _make_room(self, nbytes: int) -> bool:
        """Free disk space for a text, by removing keys and values."""
        disk, unbound = self.disk, self._unbound
        return make_room(nbytes, self.memory, self._files, lambda: disk.free, set(), unbound)

    def _prefill(self, tokens: Sequence[int]) -> None:
        with self.llm.engine.lock:
            self.llm.engine.prefill(self._active, tokens)

    def _steps(
        self,
        slot: Slot,
        tokens: Sequence[int],
        options: dict[str, Any],
        results: list[GenerationResult],
    ) -> Iterator[Delta | Pending | None]:
        """Yield the text deltas of the answer to a whole text in a slot, step by step.

        With the option `ahead` there may be a `PENDING` before a delta, but not before the first.
        An option `prompt`, a `SharedPrompt`, lets other answers continue the prompt meanwhile.
        With `context_shift`, some of the first `old` tokens (an option) make room for the others.
        """
        options = options | {"context": slot.active, "reuse": True}
        tokens = self._fitted(slot, tokens, options.pop("old", 0), options)
        ahead, prompt = options.pop("ahead", False), options.pop("prompt", None)
        with self.llm.stream(tokens, **options) as answer:
            slot.answer = answer
            with nullcontext() if prompt is None else prompt.read_by(answer):
                yield from self._advanced(answer, ahead=ahead)
        result = answer.result()
        if slot.active.forgotten:
            stats = replace(result.stats, shifted_tokens=slot.active.forgotten)
            result = replace(result, stats=stats)
        results.append(result)

    def _fitted(
        self, slot: Slot, tokens: Sequence[int], old: int, options: dict[str, Any]
    ) -> Sequence[int]:
        """Return a text whose prompt and one token of an answer fit the context.

        With `context_shift` that is at the cost of half of its first `old` tokens after those that
        are kept, or more. They leave the slot's cache, too. Where they do not suffice the text is
        as it was.
        """
        if not options.get("context_shift"):
            return tokens
        keep = check_count("keep", options.get("keep", SINKS), 0)
        over, room = len(tokens) + 1 - self.llm.max_seq_len, old - keep
        slot.working.wait_until_free()
        if not 0 < over <= room:
            return tokens
        drop = max(over, room // 2)
        self.llm.engine.lock.check()
        with self.llm.engine.lock:
            recover(self.llm.engine, slot.active)  # what moves must be there
            slot.active.forget(keep, drop)
        return [*tokens[:keep], *tokens[keep + drop :]]

    def _advanced(self, answer: Generation, *, ahead: bool) -> Iterator[Delta | Pending | None]:
        begun = False
        while not answer.finished:
            delta = answer.advance() if ahead and begun else answer.step()
            begun = begun or delta is not None
            yield delta
            self._lock.check()

    def _opened(self, path: Path) -> ServiceDirectory:
        identity, layout = self.llm.engine.contexts.identity, self._active.cache.layout
        return ServiceDirectory(path, identity, layout, self._vault)

    def _measured(self) -> tuple[ChunkCodec, ChunkDecoder]:
        """Return the model's codec and the fastest decoder; the folder keeps the measurements."""
        directory, about = self._directory, self._directory.about
        vocabulary, layout = self.llm.model.config.vocab_size, self._active.cache.layout
        if "channels" not in about:
            sample = self.llm.encode(SAMPLE_TEXT)
            directory.save(**measure_channels(self._active, sample, self._prefill))
        channels = directory.read(lambda facts: _by_layer(layout, facts["channels"]))
        codec = codec_of(layout, channels, directory.codec)
        engine = self.llm.engine
        engine.contexts.scale_by(codec.channels)
        codec = with_head_bits(codec, directory, self.compression, self.llm, self._active)
        able = {} if engine.runner.gpu_share is not None else engine.devices
        known = {decoder.name: decoder for decoder in decoders(able, codec, layout)}
        names = ", ".join(device.info.name for device in engine.devices.values())
        priced = engine.deployment.prefill_modes.priced
        measured_on = [MEASURES, names, self.llm.plan.plan_id, priced, sorted(known)]
        measured_on += [list(map(list, bits)) for bits in codec.mixed]
        if about.get("measured_on") != measured_on:
            directory.save(
                measured_on=measured_on,
                prompts=measure_prompts(self._active, vocabulary, self._prefill),
                run_s=measure_run(self._active, vocabulary, self._prefill)
                if scatters(engine.deployment)
                else None,
                load_s=measure_load(self._active, vocabulary, self._prefill),
                predicted=predict_prompts(
                    engine.deployment.prefill_modes.prompt_s, engine.max_seq_len
                )
                if priced
                else [],
                **measure_chunks(self._active, codec, directory.path, known.values()),
                **measure_disk(directory.path),
            )
        return codec, directory.read(lambda facts: known[facts["decodes"]])


def _by_layer(layout: CacheLayout, channels: Sequence[float]) -> list[npt.NDArray[np.float32]]:
    """Return the scales of each layer's channels. Raises `ValueError` for another number."""
    shapes = [layout.heads(layer) for layer in range(layout.layers)]
    stops = np.cumsum([heads * size for heads, size in shapes])
    if len(channels) != stops[-1]:
        raise ValueError(f"there are {stops[-1]} channels, got {len(channels)} scales")
    parts = np.split(np.array(channels, np.float32), stops[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _model(model: str | LLM, options: dict[str, Any]) -> LLM:
    """Return a service's model, whose caches keep a whole text.

    It may be cut anywhere and continued.
    """
    if options and isinstance(model, LLM):
        raise UserError(
            f"{', '.join(options)}: options of opening a model, and this one is open already"
        )
    opened = model if isinstance(model, LLM) else LLM(model, **options | {"whole_caches": True})
    layout = opened.context.cache.layout
    if layout.slides:
        raise UserError(
            "a service keeps all keys and values of a text, and this model was opened with caches "
            "that forget what its windows have left: open it with whole_caches=True"
        )
    return opened


class App:
    """An application of a service: its own contexts, and no other's. Made by `Service.bind`."""

    def __init__(
        self, service: Service, name: str, root: bytes, folder: Path, files: ChunkFiles
    ) -> None:
        self.service, self.name, self.root, self.folder, self.files = (
            service,
            name,
            root,
            folder,
            files,
        )
        self._contexts: dict[str, AppContext] = {}

    def contexts(self) -> list[AppContext]:
        """Return its contexts, the oldest first."""
        return list(self._contexts.values())

    def context(self, name: str) -> AppContext | None:
        """Return its context of this id, if there is one."""
        return self._contexts.get(name)

    @whole
    def new_context(
        self, *, system: str = "", chat: bool = True, name: str | None = None
    ) -> AppContext:
        """Return a new context.

        With `chat` prompts are messages in the model's template, after the system message; without,
        each continues the text so far, which begins with `system`. `name` is its id: 32 hexadecimal
        digits that no other has (default: random).

        Raises `UserError` where the app has as many as it may.
        """
        if name is not None and not (re.fullmatch("[0-9a-f]{32}", name) and not self.context(name)):
            raise UserError(
                f"a context's id must be 32 hexadecimal digits that no other has, got {name!r}"
            )
        text = Text(system=system, chat=chat, created=time.time())
        if chat and system:
            text.messages = [{"role": "system", "content": system}]
        elif system:
            text.tokens = self.service.llm.encode(system)
        with self.service._lock.taken():
            return self._added(text, name)

    def _added(self, text: Text, name: str | None = None) -> AppContext:
        if len(self._contexts) >= self.service.contexts_per_app:
            raise QuotaError(
                f"this app has {len(self._contexts)} contexts, which is all that contexts_per_app "
                "allows: delete() one, or allow more"
            )
        name = name or secrets.token_hex(16)
        service, path = self.service, self.folder / f"ctx-{name}.log"
        log = TextLog.create(path, service.disk, text, service._make_room, service._vault)
        context = self._contexts[name] = AppContext(self, name, log)
        return context

    def _open_all(self) -> None:
        """Open the texts in the folder, then the chunks that belong to them."""
        disk, room, vault = self.service.disk, self.service._make_room, self.service._vault
        logs = [
            (path.stem.removeprefix("ctx-"), TextLog.open(path, disk, room, vault))
            for path in self.folder.glob("ctx-*.log")
        ]
        for name, log in sorted(logs, key=lambda x: x[1].text.created):
            self._contexts[name] = AppContext(self, name, log)
        places = self.files.scan()
        states = self.files.states()
        for context in self._contexts.values():
            context._find(places, states)
        self.files.sweep()


class AppContext:
    """A context that persists: its text, and its keys and values as long as there is room.

    `id` never changes. `last_switch` is the cost of loading it for its last call.
    """

    def __init__(self, app: App, name: str, log: TextLog) -> None:
        self.app, self.id = app, name
        self.last_switch: Switch | None = None
        self._log = log
        self._cached = CachedText(
            app.name, log.text.root or app.root, list(log.text.tokens), origin=app.root
        )
        self._deleted = self._busy = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the token ids of the text on the disk."""
        return tuple(self._log.text.tokens)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of a chat."""
        return list(self._log.text.messages)

    def __len__(self) -> int:
        return len(self._log.text.tokens)

    def __bool__(self) -> bool:
        return True

    def where(self) -> dict[str, int]:
        """Count its chunks by where they are: bits in memory, only on the disk, or only text."""
        return self.app.service.memory.histogram(self._cached.chunks)

    def nbytes(self) -> int:
        """Return the bytes of its chunks in memory."""
        return self.app.service.memory.nbytes(dict.fromkeys(self._cached.all_chunks))

    @whole
    def become(self, tokens: Sequence[int]) -> None:
        """Set its text, which is on the disk when this returns; a common prefix stays cached."""
        with self.app.service._lock.taken():
            self._check()
            self._log.append(tokens, ())
            self._begin_again()

    def call(self, prompt: str, **options: Any) -> GenerationResult:
        """Return the answer to a prompt, once both are on the disk."""
        results: list[GenerationResult] = []
        for _ in WholeSteps(self._answer(prompt, options, results)):
            pass
        return results[0]

    def stream(self, prompt: str, **options: Any) -> Iterator[Delta]:
        """Yield the text deltas of the answer.

        An answer that is not read to its end does not join the context.
        """
        steps = WholeSteps[Delta | Pending | None](self._answer(prompt, options, []))
        return (delta for delta in steps if isinstance(delta, Delta))

    def stream_text(
        self, tokens: Sequence[int], results: list[GenerationResult], **options: Any
    ) -> WholeSteps[Delta | Pending | None]:
        """Return the steps of the answer to a whole text, which replaces the context's own.

        A common prefix is reused. A step is a text delta, or None where it gave none. The result is
        added to `results` when all is on the disk. Options are those of `LLM.stream`, and `old`:
        how many of the tokens may be forgotten with `context_shift` to make room for the others.
        """
        return WholeSteps(self._become_answered(tokens, results, options))

    def _become_answered(
        self, tokens: Sequence[int], results: list[GenerationResult], options: dict[str, Any]
    ) -> Iterator[Delta | Pending | None]:
        with self.app.service._lock.taken(), self._at_work():
            ended: list[GenerationResult] = []
            if list(tokens[: len(self)]) != self._log.text.tokens:
                self._begin_again()
            with self.app.service._slots.taken(self._cached.root, tokens) as slot:
                run = partial(self._run, slot, list(tokens), options, ended)
                yield from slot.working.answering(self._cached, list(tokens), run)
                self._leave(slot, self._log.text.messages)
            results += ended

    @whole
    def fork(self) -> AppContext:
        """Return an independent copy of the context; chunks are shared."""
        service, text = self.app.service, self._log.text
        with service._lock.taken():
            self._check()
            other = self.app._added(
                replace(
                    text,
                    tokens=list(text.tokens),
                    messages=list(text.messages),
                    created=time.time(),
                )
            )
            with service.memory.lock:
                cached = self._cached.chunks[-1].stop if self._cached.chunks else 0
                tokens, table, app = text.tokens[:cached], service.memory.table, self.app
                root = self._cached.root
                other._cached.chunks = table.refer(
                    app.name, root, tokens, service.compression.first
                )
                other._cached.snapshots = table.refer_snapshots(app.name, root, tokens)
            return other

    @whole
    def delete(self) -> None:
        """Delete text, keys and values from the disk, before this returns; idempotent."""
        service = self.app.service
        with service._lock.taken():
            if self._deleted:
                return
            self._check()
            service._slots.forget(self._cached.root)
            service.swap.drain()
            self._log.delete()
            service._working.release(self._cached.all_chunks)
            compact(self.app.files, service.memory, self.app.name, everything=True)
            sync_directory(self.app.folder)
            self._cached.chunks, self._cached.snapshots, self._deleted = [], [], True
            del self.app._contexts[self.id]

    # --- a call -----------------------------------------------------------------------------

    def _answer(
        self, prompt: str, options: dict[str, Any], results: list[GenerationResult]
    ) -> Iterator[Delta | Pending | None]:
        for name in ("context", "reuse", "chat", "echo", "old"):
            if name in options:
                raise UserError(f"{name!r} is not an option of a persistent context's call")
        service, text = self.app.service, self._log.text
        with service._lock.taken(), self._at_work():
            whole, messages = self._whole(prompt, options)
            if options.get("context_shift") and text.chat and text.system:
                options = {"keep": self._system_tokens()} | options
            old = len(self) if whole[: len(self)] == text.tokens else 0
            if not old:
                self._begin_again()
            with service._slots.taken(self._cached.root, whole) as slot:
                run = partial(self._run, slot, whole, options | {"old": old}, results)
                yield from slot.working.answering(self._cached, whole, run)
                history = [*messages, {"role": "assistant", "content": results[0].text}]
                self._leave(slot, history if text.chat else ())

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Mark the context as busy inside the block."""
        self._check()
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _run(
        self,
        slot: Slot,
        whole: list[int],
        options: dict[str, Any],
        results: list[GenerationResult],
        switch: Switch,
    ) -> Iterator[Delta | Pending | None]:
        self.last_switch = switch
        options = {"chat": self._log.text.chat} | options
        yield from self.app.service._steps(slot, whole, options, results)

    def _begin_again(self) -> None:
        """Forget the keys and values of a text that was shifted: it becomes one that was not."""
        cached, service = self._cached, self.app.service
        if cached.shifted:
            service._slots.forget(cached.root)
            service._working.release(cached.all_chunks)
            cached.root, cached.chunks, cached.snapshots = cached.origin, [], []

    def _leave(self, slot: Slot, messages: Sequence[dict[str, Any]]) -> None:
        """Take over the slot's text, once it is on the disk with the messages of a chat."""
        service, cached = self.app.service, self._cached
        used, root = slot.working.tick(), slot.working.root_after(cached)
        kept = b"" if root == cached.origin else root
        self._log.append(slot.active.tokens, messages, used=used, root=kept)
        chunks = slot.working.leave(cached, service.compression.first, root)
        service.compression.apply(service.memory, chunks)
        slot.working.swap_out(self._cached)

    def _whole(self, prompt: str, options: dict[str, Any]) -> tuple[list[int], list[Any]]:
        """Return the tokens of the text with the prompt, and the messages of a chat."""
        service, text = self.app.service, self._log.text
        if text.chat:
            history = [*text.messages, {"role": "user", "content": prompt}]
            answer = check_count("max_tokens", options.get("max_tokens", 1))
            tokens = self._continued(history)
            full = len(tokens) + answer > service.llm.max_seq_len
            if not tokens or (full and not options.get("context_shift")):
                tokens = Conversation(service.llm, context=service._active).fitting(history, answer)
            return tokens, history
        tokens = service.llm.encode(prompt)
        start = service.llm.model.tokenizer.bos_id
        if text.tokens and len(tokens) > 1 and tokens[0] == start:
            tokens = tokens[1:]
        return [*text.tokens, *tokens], []

    def _continued(self, history: list[Any]) -> list[int]:
        """Return the text so far with the answers' own tokens, then the template's text of a turn.

        A text that is rendered again from its messages often has other tokens. The new turn begins
        where two conversations that differ only in their last answer are equal again.
        """
        if len(history) < 3 or history[-2]["role"] != "assistant":
            return []
        one, other = (
            self.app.service.llm.encode_chat(
                [*history[:-2], {**history[-2], "content": x}, history[-1]]
            )
            for x in ("0", "z")
        )
        pairs = enumerate(zip(reversed(one), reversed(other), strict=False))
        count = next((i for i, (a, b) in pairs if a != b), 0)
        return [*self.tokens, *one[-count:]] if count else []

    def _system_tokens(self) -> int:
        """Return how many tokens a chat begins with before the first prompt."""
        system = {"role": "system", "content": self._log.text.system}
        one, other = (
            self.app.service.llm.encode_chat([system, {"role": "user", "content": x}])
            for x in ("0", "z")
        )
        pairs = enumerate(zip(one, other, strict=False))
        return max(SINKS, next((i for i, (a, b) in pairs if a != b), 0))

    def _find(self, places: dict[bytes, Any], states: set[int]) -> None:
        """Find its chunks and snapshots, and their places on the disk.

        Snapshots are after `states` tokens.
        """
        service = self.app.service
        first, used = service.compression.first, self._log.text.used
        service._working.tick(used)
        with service.memory.lock:
            table, name, root = service.memory.table, self.app.name, self._cached.root
            # A text's last token may not have been computed: its chunk is then another one.
            lengths = [len(self.tokens), len(self.tokens) - 1]
            for length in (n for n in lengths if n > 0):
                chunks = table.refer(name, root, self.tokens[:length], first)
                if chunks[-1].full or chunks[-1].key in places or length == lengths[-1]:
                    break
                table.release(chunks)
            keys = end_keys(root, self.tokens, states)
            self._cached.chunks = chunks if self.tokens else []
            self._cached.snapshots = [
                table.refer_snapshot(name, root, self.tokens[:at])
                for at, key in keys.items()
                if chained_key(key, ()) in places
            ]
            for chunk in self._cached.all_chunks:
                chunk.used = max(chunk.used, used)
                if chunk.place is None and chunk.key in places:
                    chunk.place, chunk.density = places[chunk.key]
                    chunk.bits = chunk.place.bits if chunk.full else chunk.bits
                    self.app.files.adopt(chunk.place)

    def _check(self) -> None:
        if self._deleted:
            raise UserError("this context was deleted: make another one with new_context()")
        if self._busy:
            raise UserError(
                "a stream of this context is unfinished: read it to its end or close() it before "
                "the next call"
            )


def _chunk_budget(size: str | int, workspace_bytes: int) -> ByteBudget:
    """Return the budget of chunks in memory, without the workspace of one chunk.

    Raises `UserError` where it is too small for that.
    """
    memory = ByteBudget(parse_size(size), "context_memory")
    if not memory.take(workspace_bytes):
        raise UserError(
            f"context_memory must be more than the {workspace_bytes} bytes that work on one chunk "
            f"takes, got {memory.limit}"
        )
    return memory
