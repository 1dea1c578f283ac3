"""Several streams of one thread, each in a cache of its own; what is deleted is gone for good."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero import LLM, Service, UserError
from hetero.backends.host import files
from hetero.contexts import service as services
from hetero.contexts.recent import RecentTexts
from hetero.generation.loop import PENDING, Delta, decode_together
from tests.contexts.models import open_llm
from tests.runtime.models import tiny_model

OPTIONS: dict[str, Any] = {"context_memory": "8MiB", "context_disk": "8MiB", "kv_bits": "raw"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: Any) -> Iterator[LLM]:
    with open_llm(tiny_model(tmp_path_factory.mktemp("tiny")), "reference npu") as opened:
        yield opened


def test_streams_that_take_turns_are_what_each_is_alone(llm: LLM, tmp_path: Path) -> None:
    texts = [[7 + i, *range(20, 30 + 9 * i)] for i in range(3)]
    alone = [llm.generate(text, max_tokens=20).tokens for text in texts]
    with Service(llm, directory=tmp_path, parallel=3, **OPTIONS) as service:
        contexts = [service.bind(f"app {i % 2}").new_context(chat=False) for i in range(3)]
        results: list[list[Any]] = [[], [], []]
        streams = {
            i: context.stream_text(text, results[i], max_tokens=20)
            for i, (context, text) in enumerate(zip(contexts, texts, strict=True))
        }
        rounds = 0
        while streams:
            steps = service.work.tokens
            service.decode_together()
            together = service.work.tokens - steps
            rounds += together == len(streams)
            for i, stream in list(streams.items()):
                try:
                    next(stream)
                except StopIteration:
                    del streams[i]
        assert [found[0].tokens for found in results] == alone
        assert rounds > 15
        assert [context.tokens[-1] for context in contexts] == [tokens[-1] for tokens in alone]


def test_a_prompt_read_before_an_answer_takes_its_logits_does_not_replace_them(llm: LLM) -> None:
    """The only answer that decodes gets its logits, then another one's prompt is read."""
    first, second = [7, 20, 21], [9, *range(30, 60)]
    alone = [llm.generate(prompt, max_tokens=6).tokens for prompt in (first, second)]
    with llm.new_context() as one, llm.new_context() as other:
        answer = llm.stream(first, context=one, max_tokens=6)
        while not answer.result().tokens:
            answer.step()
        reading = llm.stream(second, context=other, max_tokens=6)
        decode_together(llm.engine, [reading, answer])
        for stream in (reading, answer):
            while not stream.finished:
                stream.step()
        assert [answer.result().tokens, reading.result().tokens] == alone


def test_pieces_that_come_later_are_the_same(llm: LLM, tmp_path: Path) -> None:
    """They are made while the next token is computed, the first one at once; no other token is
    computed but where an answer ends.
    """
    texts = [[7 + i, *range(20, 30 + 9 * i)] for i in range(3)]
    alone = [llm.generate(text, max_tokens=12) for text in texts]
    stop = alone[1].text[3:6]
    with Service(llm, directory=tmp_path, parallel=3, **OPTIONS) as service:
        app = service.bind("a")
        contexts = [app.new_context(chat=False) for _ in texts]
        results: list[list[Any]] = [[] for _ in texts]
        said: list[list[str]] = [[] for _ in texts]
        last: dict[int, Any] = {}
        streams = {
            i: context.stream_text(
                text, results[i], max_tokens=12, ahead=True, stop=[stop] if i == 1 else []
            )
            for i, (context, text) in enumerate(zip(contexts, texts, strict=True))
        }
        besides = list[bool]()

        def read(i: int) -> None:
            last[i] = next(streams[i], None)
            if isinstance(last[i], Delta):
                said[i].append(last[i].text)
            elif last[i] is None and results[i]:
                del streams[i]

        def beside() -> None:
            waiting = [i for i in streams if last.get(i) is PENDING]
            besides.append(bool(waiting))
            for i in waiting:
                read(i)
                assert isinstance(last[i], Delta)

        while streams:
            service.decode_together(beside)
            for i in list(streams):
                first = not said[i]
                read(i)
                assert not (first and last[i] is PENDING)
        assert sum(besides) >= 10
        for i, (context, found, whole) in enumerate(zip(contexts, results, alone, strict=True)):
            text = whole.text.partition(stop)[0] if i == 1 else whole.text
            assert "".join(said[i]) == found[0].text == text
            assert found[0].tokens == whole.tokens[: len(found[0].tokens)]
            assert context.tokens == (*texts[i], *found[0].tokens)


def test_an_answer_that_is_given_up_says_all_that_it_has(llm: LLM) -> None:
    found = []
    for ahead in (False, True):
        with llm.new_context() as context:
            answer = llm.stream([5, 6, 7], context=context, max_tokens=9)
            while (answer.advance() if ahead else answer.step()) is None:
                pass
            answer.close()
            found.append((answer.result().tokens, answer.result().text, context.tokens))
    assert found[0] == found[1]
    assert len(found[0][0]) == 1


def test_what_cannot_be_at_work_twice_says_so(llm: LLM, tmp_path: Path) -> None:
    with Service(llm, directory=tmp_path, parallel=2, **OPTIONS) as service:
        one, two, three = (service.bind("a").new_context(chat=False) for _ in range(3))
        streams = [context.stream_text([1, 2, 3], [], max_tokens=20) for context in (one, two)]
        for stream in streams:
            next(stream)
        assert not service.room()
        with pytest.raises(UserError, match="which is all that `parallel` allows"):
            next(three.stream_text([1], []))
        for call in (one.delete, one.fork, lambda: next(one.stream_text([1], []))):
            with pytest.raises(UserError, match="a stream of this context is unfinished"):
                call()
        for stream in streams:
            stream.close()
        assert service.room()
        one.delete()


def test_texts_that_end_with_the_process_are_not_synced(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(files.os, "fsync", lambda x: (synced.append(x), fsync(x)))  # type: ignore[func-returns-value]
    with Service(llm, directory=tmp_path, **OPTIONS) as service:
        app = service.bind("a")
        recent, context = RecentTexts(app, 2), app.new_context(chat=False)
        found = []
        for stream in (recent.stream, lambda _, *given, **k: context.stream_text(*given, **k)):
            synced.clear()
            kept = len(list(app.folder.glob("*.kv")))
            list(stream(0, list(range(1, 60)), [], max_tokens=3))
            service.swap.drain()
            assert len(list(app.folder.glob("*.kv"))) > kept
            found.append(len(synced))
        assert found[0] == 0
        assert found[1] > 0


def test_a_deletion_is_durable_before_it_returns(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last thing that happens is that the directory is synced, and nothing is in it then."""
    seen: list[list[str]] = []

    def synced(path: Path) -> None:
        files.sync_directory(path)
        seen.append(sorted(x.name for x in path.iterdir()))

    with Service(llm, directory=tmp_path, **OPTIONS) as service:
        app = service.bind("a")
        context = app.new_context(chat=False)
        list(context.stream_text(list(range(1, 60)), [], max_tokens=3))
        service.swap.drain()
        kept = sorted(x.suffix for x in app.folder.iterdir())
        assert ".kv" in kept
        assert ".log" in kept
        monkeypatch.setattr(services, "sync_directory", synced)
        context.delete()
        assert seen[-1] == sorted(x.name for x in app.folder.iterdir())
        assert not [name for name in seen[-1] if name.endswith((".kv", ".log"))]
