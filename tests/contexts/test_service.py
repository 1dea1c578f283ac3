"""Contexts of applications on the demo model: out to the disk, out to text alone, and back."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetero
from hetero import LLM, Service, UserError
from hetero.contexts import chunk_files, directory
from hetero.contexts.codec import CODEC_VERSION, FIRST_VERSIONS, MIXED
from hetero.contexts.head_bits import measure_heads
from tests.support.checkpoints import GEMMA4, make_checkpoint

PROMPTS = ["Once upon a time there was a fox", " The fox saw", " In the end", " Then"]
OPTIONS: dict[str, Any] = {"max_tokens": 24, "logprobs": 2}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="npu") as opened:
        yield opened


def opened(llm: LLM, folder: Path, **options: Any) -> Service:
    given: dict[str, Any] = {"context_memory": "8MiB", "context_disk": "64MiB", "kv_bits": "raw"}
    return Service(llm, directory=folder, **(given | options))


def numbers(result: Any) -> Any:
    return result.tokens, result.logprobs


def story(llm: LLM) -> list[Any]:
    """A context that is never switched out, in the same calls."""
    with llm.new_context() as context:
        return [numbers(llm.generate(p, context=context, **OPTIONS)) for p in PROMPTS]


def evicted(service: Service, *, disk: bool) -> None:
    """Everything that can leave the memory does; without `disk` from there as well."""
    service.swap.drain()
    service.memory.reclaim(sum(c.codes.nbytes for c in service.memory.table if c.codes is not None))
    if not disk:
        for app in service._apps.values():
            for chunk in service.memory.table:
                if chunk.app == app.name and chunk.place is not None:
                    app.files.drop(chunk.place)
                    chunk.place = None
    service._working.forget()


@pytest.mark.full
@pytest.mark.parametrize("memory", ["8MiB", "1MiB"])
def test_through_the_disk_and_back_to_the_same_bits(llm: LLM, tmp_path: Path, memory: str) -> None:
    """Exact codes, read and not computed again: every bit is that of a context that stayed."""
    wanted = story(llm)
    with opened(llm, tmp_path, recompute=False, context_memory=memory) as service:
        app = service.bind("a")
        context, other = app.new_context(chat=False), app.new_context(chat=False)
        for prompt, expected in zip(PROMPTS, wanted, strict=True):
            assert numbers(context.call(prompt, **OPTIONS)) == expected
            evicted(service, disk=True)
            assert set(context.where()) == {"disk"}
            other.call("Somebody else", max_tokens=20)
            evicted(service, disk=True)
        switch = context.last_switch
        assert switch is not None
        assert switch.loaded_bytes > 0
        assert switch.recomputed_tokens == 0
        assert service.memory.budget.peak <= service.memory.budget.limit
        service.memory.check()


@pytest.mark.full
def test_a_folder_of_the_first_codec_goes_on(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(directory, "CODEC_VERSION", FIRST_VERSIONS[0])
        with opened(llm, tmp_path, kv_bits="8") as service:
            service.bind("a").new_context(chat=False).call(PROMPTS[0], max_tokens=40)
    with opened(llm, tmp_path, kv_bits="8", recompute=False) as service:
        assert service._directory.codec == FIRST_VERSIONS[0]
        context = service.bind("a").contexts()[0]
        context.call(PROMPTS[1], max_tokens=2)
        switch = context.last_switch
        assert switch is not None
        assert switch.loaded_tokens > 32
        assert switch.recomputed_tokens == 0
    with opened(llm, tmp_path / "new") as service:
        assert service._directory.codec == CODEC_VERSION


def chunk_bits(context: Any) -> list[int]:
    return [chunk.bits for chunk in context._cached.chunks if chunk.full]


@pytest.mark.full
@pytest.mark.parametrize("bits", ["8", "4"])
def test_the_first_chunk_has_8_bits(llm: LLM, tmp_path: Path, bits: Any) -> None:
    with opened(llm, tmp_path, kv_bits=bits) as service:
        context = service.bind("a").new_context(chat=False)
        context.call(PROMPTS[0], max_tokens=30)
        context.call(PROMPTS[1], max_tokens=30)
        service.swap.drain()
        first, *others = chunk_bits(context)
        assert first == 8
        assert {*others} == {int(bits)}


@pytest.mark.full
def test_layers_have_bits_of_their_own(
    llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are measured once for a folder and a ratio, and what was stored stays readable."""
    measured = []

    def losses(*args: Any) -> Any:
        measured.append(args)
        return measure_heads(*args)

    monkeypatch.setattr("hetero.contexts.head_bits.measure_heads", losses)
    for i, ratio in enumerate((0.5, 0.375, 0.5)):
        with opened(llm, tmp_path, kv_bits="mixed", kv_ratio=ratio) as service:
            context = service.bind("a").new_context(chat=False)
            for prompt in PROMPTS:
                context.call(f"{i} {prompt}", max_tokens=30)
            service.swap.drain()
            codec, number = service._codec, MIXED + i % 2
            assert len(codec.mixed) == min(i + 1, 2)
            assert codec.nbytes(16, number) <= ratio * codec.nbytes(16, 8)
            first, *others = chunk_bits(context)
            assert first == 8
            assert {*others} == {number}
            kept = [chunk for chunk in context._cached.chunks if chunk.full and chunk.codes]
            assert all(chunk.codes.bits == chunk.bits for chunk in kept)
            assert {*context.where()} <= {"8", "32", "mixed"}
            evicted(service, disk=True)
            for other in service.bind("a").contexts():
                other.call(" more", max_tokens=2)
                switch = other.last_switch
                assert switch is not None
                assert switch.loaded_tokens > 32
    assert len(measured) == 2
    assert capsys.readouterr().err.count("measuring how many bits each head needs") == 2
    facts = json.loads((tmp_path / "service.json").read_text())
    facts["mixed"]["0.5"][0] = 5
    (tmp_path / "service.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"service\.json: is damaged"):
        opened(llm, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("kv", ["q8", "f32"])
def test_caches_of_several_widths_come_back_to_the_same_bits(tmp_path: Path, kv: str) -> None:
    """Layers with heads of other sizes, and layers that read the caches of others."""
    make_checkpoint(GEMMA4, tmp_path / "model")
    with (
        LLM(str(tmp_path / "model"), device="npu", kv=kv, whole_caches=True) as llm,
        opened(llm, tmp_path / "contexts", recompute=False) as service,
    ):
        wanted = story(llm)
        context = service.bind("a").new_context(chat=False)
        for prompt, expected in zip(PROMPTS, wanted, strict=True):
            assert numbers(context.call(prompt, **OPTIONS)) == expected
            evicted(service, disk=True)
        switch = context.last_switch
        assert switch is not None
        assert switch.loaded_bytes > 0
        assert switch.recomputed_tokens == 0


@pytest.mark.full
@pytest.mark.parametrize("bits", ["8", "raw"])
def test_caches_of_codes_come_back_to_the_same_bits(tmp_path: Path, bits: Any) -> None:
    """Chunks of 8 bits are what such a cache holds, in the channels that the service measured."""
    with (
        LLM("demo", device="npu", kv="q8") as coded,
        opened(coded, tmp_path, recompute=False, kv_bits=bits) as service,
    ):
        wanted = story(coded)
        context = service.bind("a").new_context(chat=False)
        for prompt, expected in zip(PROMPTS, wanted, strict=True):
            assert numbers(context.call(prompt, **OPTIONS)) == expected
            evicted(service, disk=True)
        switch = context.last_switch
        assert switch is not None
        assert switch.loaded_bytes > 0
        assert switch.recomputed_tokens == 0


@pytest.mark.full
def test_from_the_text_alone_to_the_same_text(llm: LLM, tmp_path: Path) -> None:
    """What is computed again differs in its last bits at most: other calls, the same operations."""
    wanted = story(llm)
    with opened(llm, tmp_path) as service:
        context = service.bind("a").new_context(chat=False)
        for prompt, (tokens, logprobs) in zip(PROMPTS, wanted, strict=True):
            found = context.call(prompt, **OPTIONS)
            assert found.tokens == tokens
            for one, other in zip(found.logprobs, logprobs, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=2e-3)
            evicted(service, disk=False)
            assert set(context.where()) == {"text"}
        switch = context.last_switch
        assert switch is not None
        assert switch.loaded_tokens == 0
        assert switch.recomputed_tokens == switch.tail_tokens > 0


@pytest.mark.full
@pytest.mark.parametrize("bits", ["8", "mixed", "4"])
def test_lossy_codes_cost_what_they_are_said_to(llm: LLM, tmp_path: Path, bits: Any) -> None:
    """After a switch, logits of the same text differ by little at 8 bits, by more at 4."""
    text = llm.encode(" ".join([*PROMPTS, *PROMPTS]))
    with opened(llm, tmp_path, kv_bits=bits, recompute=False) as service:
        context = service.bind("a").new_context(chat=False)
        context.call(" ".join([*PROMPTS, *PROMPTS]), max_tokens=1)
        held, active = context._cached, service._active
        exact = active.cache.read(0, len(text) // 16 * 16).astype(np.float64)
        evicted(service, disk=True)
        whole = [*context.tokens, 5]
        for _ in service._working.answering(held, whole, lambda _switch: iter(())):
            pass
        found = active.cache.read(0, exact.shape[3])
        error = np.sqrt(np.square(found - exact).mean() / np.square(exact).mean())
        most = {8: 0.02, 6: 0.2, 4: 0.2, 3: 0.5, 2: 0.9}
        (lowest,) = {min(map(min, own)) for own in service._codec.mixed} or {int(bits)}
        assert error <= most[lowest], "amplitudes are at most some four times the mean"
        assert error > 0


def test_it_survives_the_process_and_another_app_shares_nothing(llm: LLM, tmp_path: Path) -> None:
    with opened(llm, tmp_path) as service:
        context = service.bind("notes").new_context(system="Be short.")
        context.call("Tell me a story", max_tokens=30)
        text, messages, name = context.tokens, context.messages, context.id
        same = service.bind("other").new_context(system="Be short.")
        same.call("Tell me a story", max_tokens=30)
        assert same.tokens == text
        assert same.last_switch is not None
        assert same.last_switch.reused_tokens == same.last_switch.loaded_tokens == 0
        roots = {chunk.key for chunk in context._cached.chunks}
        assert not roots & {chunk.key for chunk in same._cached.chunks}
    with opened(llm, tmp_path, recompute=False) as service:
        (again,) = service.bind("notes").contexts()
        assert (again.tokens, again.messages, again.id) == (text, messages, name)
        assert again.where() == {"disk": -(-(len(text) - 1) // 16)}
        answer = again.call("And then?", max_tokens=10)
        assert answer.stats.reused_tokens > 0
        assert again.messages[:-2] == messages


def test_equal_beginnings_of_an_app_are_one(llm: LLM, tmp_path: Path) -> None:
    with opened(llm, tmp_path) as service:
        app = service.bind("a")
        first = app.new_context(chat=False)
        first.call(" ".join(PROMPTS), max_tokens=2)
        service.swap.drain()
        used = service.memory.budget.used
        other = first.fork()
        assert other.tokens == first.tokens
        assert service.memory.budget.used == used, "nothing is copied"
        other.call(PROMPTS[1], max_tokens=2)
        shared = set(first._cached.chunks) & set(other._cached.chunks)
        assert shared
        assert all(chunk.refs == 2 for chunk in shared)
        assert len(first.tokens) < len(other.tokens)
        first.delete()
        service.swap.drain()
        assert all(chunk.refs == 1 for chunk in other._cached.chunks)
        evicted(service, disk=True)
        other.call(PROMPTS[2], max_tokens=2)


@pytest.mark.full
def test_deleting_leaves_nothing_on_the_disk(llm: LLM, tmp_path: Path) -> None:
    with opened(llm, tmp_path) as service:
        app = service.bind("a")
        context = app.new_context(chat=False)
        context.call("xylophone xylophone xylophone", max_tokens=20)
        context.delete()
        context.delete()
        assert app.contexts() == []
        assert [p.name for p in app.folder.iterdir()] == []
        assert service.disk.used == 0
        assert len(service.memory.table) == 0
        with pytest.raises(UserError, match="this context was deleted"):
            context.call("more")


# --- faults -----------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data), 997):
        data[at] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.full
@pytest.mark.parametrize("harm", [flip, cut, Path.unlink])
def test_damaged_chunks_cost_computing_them(llm: LLM, tmp_path: Path, harm: Any) -> None:
    wanted = story(llm)
    with opened(llm, tmp_path, recompute=False) as service:
        app = service.bind("a")
        context = app.new_context(chat=False)
        faults = 0
        for prompt, (tokens, _) in zip(PROMPTS, wanted, strict=True):
            assert context.call(prompt, **OPTIONS).tokens == tokens
            assert context.last_switch is not None
            faults += context.last_switch.faults
            evicted(service, disk=True)
            for path in app.folder.glob("*.kv"):
                harm(path)
        assert faults > 0
        service.swap.drain()
        service.memory.check()


@pytest.mark.full
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_cannot_be_written_costs_no_answer(
    llm: LLM, tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = story(llm)

    def fail(chunks: Any, layers: int) -> Iterator[bytes]:
        yield b"a part"
        raise OSError(error, os.strerror(error))

    with opened(llm, tmp_path) as service:
        monkeypatch.setattr(chunk_files, "_planes", fail)
        app = service.bind("a")
        context = app.new_context(chat=False)
        for prompt, expected in zip(PROMPTS, wanted, strict=True):
            assert numbers(context.call(prompt, **OPTIONS)) == expected
        service.swap.drain()
        assert len(service.swap.faults) == len(PROMPTS)
        assert [p.suffix for p in app.folder.iterdir()] == [".log"], "no part of a file is left"
        assert service.disk.used == sum(p.stat().st_size for p in app.folder.iterdir())


@pytest.mark.full
def test_a_disk_that_is_full_keeps_the_newest(llm: LLM, tmp_path: Path) -> None:
    with opened(llm, tmp_path, context_disk="1MiB", contexts_per_app=20) as service:
        app = service.bind("a")
        contexts = [app.new_context(chat=False) for _ in range(4)]
        for seed, context in enumerate(contexts):
            context.call(f"{seed} {PROMPTS[0]}", max_tokens=90, seed=seed, temperature=1.0)
        service.swap.drain()
        assert service.disk.used <= service.disk.limit
        evicted(service, disk=True)
        assert set(contexts[0].where()) == {"text"}
        assert set(contexts[-1].where()) == {"disk"}
        for context in contexts:
            context.call("more", max_tokens=2)


@pytest.mark.full
def test_a_log_that_ends_in_the_middle_loses_that_call_alone(llm: LLM, tmp_path: Path) -> None:
    with opened(llm, tmp_path) as service:
        context = service.bind("a").new_context(chat=False)
        context.call(PROMPTS[0], max_tokens=10)
        before = context.tokens
        context.call(PROMPTS[1], max_tokens=10)
        path = context._log.path
    os.truncate(path, path.stat().st_size - 3)
    with opened(llm, tmp_path) as service:
        (again,) = service.bind("a").contexts()
        assert again.tokens == before
        again.call(PROMPTS[1], max_tokens=10)


@pytest.mark.full
@pytest.mark.parametrize("at", [3, 20, 150])
def test_a_log_that_is_damaged_before_its_end_is_refused(llm: LLM, tmp_path: Path, at: int) -> None:
    """Nothing that was acknowledged is thrown away without a word."""
    with opened(llm, tmp_path) as service:
        context = service.bind("a").new_context(chat=False)
        for prompt in PROMPTS * 2:
            context.call(prompt, max_tokens=4)
        path = context._log.path
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with opened(llm, tmp_path) as service:
        before = service.disk.used
        for _ in range(2):
            with pytest.raises(UserError, match="is damaged at byte"):
                service.bind("a")
        assert service.disk.used == before
    assert path.read_bytes() == data


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"eviction": "fifo"}, "eviction is lctru, lctru-paper, lru or context, got 'fifo'"),
        ({"device": "gpu"}, "device: options of opening a model, and this one is open already"),
        ({"context_memory": 1000}, "context_memory must be more than"),
        ({"kv_bits": "5"}, "kv_bits is raw, 16, 8, 4, 2 or mixed, got '5'"),
        ({"kv_ratio": 2}, r"kv_ratio is from 0\.25 to 1"),
        ({"contexts_per_app": 0}, "contexts_per_app must be at least 1"),
    ],
)
def test_options_that_cannot_be(llm: LLM, tmp_path: Path, options: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        opened(llm, tmp_path, **options)


def test_folders_that_cannot_be(llm: LLM, tmp_path: Path) -> None:
    with (
        opened(llm, tmp_path / "c"),
        pytest.raises(UserError, match="another process uses these contexts"),
    ):
        opened(llm, tmp_path / "c")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="contexts cannot be stored here"):
        opened(llm, tmp_path / "file")
    about = tmp_path / "c" / "service.json"
    text = about.read_text()
    about.write_text(text.replace('"weights": "', '"weights": "other '))
    with pytest.raises(UserError, match="belong to another model or weight format"):
        opened(llm, tmp_path / "c")
    about.write_text(text[: len(text) // 2])
    with pytest.raises(UserError, match="is damaged"):
        opened(llm, tmp_path / "c")


def test_calls_that_cannot_be(llm: LLM, tmp_path: Path) -> None:
    with opened(llm, tmp_path, contexts_per_app=1) as service:
        app = service.bind("a")
        context = app.new_context()
        with pytest.raises(UserError, match="this app has 1 contexts"):
            app.new_context()
        with pytest.raises(UserError, match="'reuse' is not an option"):
            context.call("x", reuse=True)
        with pytest.raises(UserError, match="an app's name"):
            service.bind("")
        pieces = context.stream("Tell me a story", max_tokens=5)
        next(pieces)
        with pytest.raises(UserError, match="a stream of this service is unfinished"):
            context.call("x")
        del pieces
        assert context.tokens == (), "an answer that was not read to its end is not kept"
        assert context.call("Tell me a story", max_tokens=3).text
    assert hetero.Service is Service
