"""kill -9 of a process with contexts, in every phase of its work: nothing acknowledged is lost.

`HETERO_KILLS=200 pytest tests/contexts/test_context_kills.py` kills as often as one likes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetero import LLM, Service
from tests.support import tiny_files
from tests.support.checkpoints import CASES, make_checkpoint

KILLS = int(os.environ.get("HETERO_KILLS", "4"))
LONGEST_S = 0.25  # a few rounds of the child's loop: calls, swap-out, compaction, delete, fork
# Says what was acknowledged, in a line for each call, after it was.
CHILD = """
import itertools, json, sys
from hetero import LLM, Service
folder = sys.argv[1]
llm = LLM(f"{folder}/model", device="npu")
service = Service(llm, directory=f"{folder}/contexts", context_memory="1MiB",
                  context_disk="300KiB", kv_bits="8", contexts_per_app=6)
app = service.bind("a")
print("ready", flush=True)
def say(**facts):
    print(json.dumps(facts), flush=True)
for i in itertools.count():
    contexts = app.contexts()
    if len(contexts) < 4:
        context = app.new_context(chat=False)
        say(new=context.id)
    elif i % 5 == 4:
        say(deleting=contexts[0].id)
        contexts[0].delete()
        say(deleted=contexts[0].id)
        continue
    elif i % 7 == 6:
        context = contexts[1].fork() if len(contexts) < 6 else contexts[1]
    else:
        context = contexts[i % len(contexts)]
    if len(context) > 30:
        say(deleting=context.id)
        context.delete()
        say(deleted=context.id)
        continue
    context.call("hi hi hi", max_tokens=3, seed=i)
    say(id=context.id, tokens=context.tokens)
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
@pytest.mark.parametrize("states", [False, True])
def test_nothing_acknowledged_is_lost(states: bool, tmp_path: Path) -> None:
    """Also of a model with states, whose snapshots are among the files."""
    chance = random.Random(5)
    if states:
        make_checkpoint(next(x for x in CASES if x.name == "lfm2"), tmp_path / "model")
    else:
        tiny_files.write_directory(tmp_path / "model")
    texts: dict[str, list[int]] = {}
    seen = 0
    with LLM(str(tmp_path / "model"), device="npu") as llm:
        for kill in range(KILLS):
            said, doomed = acknowledged(chance.uniform(0.0, LONGEST_S), tmp_path, texts)
            seen += said
            with Service(
                llm, directory=tmp_path / "contexts", context_disk="300KiB", contexts_per_app=20
            ) as service:
                found = {x.id: x for x in service.bind("a").contexts()}
                for name, tokens in texts.items():
                    if name == doomed and name not in found:
                        continue
                    own = list(found[name].tokens)
                    assert own[: len(tokens)] == tokens, f"kill {kill}: a text was lost"
                for name in list(texts):
                    texts.pop(name) if name not in found else None
                for name, context in found.items():  # each can be gone on with
                    if len(context) < 30:
                        context.call("hi", max_tokens=1)
                    texts[name] = list(context.tokens)
                service.swap.drain()
                service.memory.check()
                on_disk = sum(p.stat().st_size for p in tmp_path.glob("contexts/apps/*/*"))
                assert service.disk.used == on_disk, "what a killed process left is counted or gone"
    assert seen, "no kill came after the first call"


def acknowledged(delay_s: float, folder: Path, texts: dict[str, list[int]]) -> tuple[int, str]:
    """Start the child, kill it; `texts` are then what it acknowledged. How many calls that were,
    and the context that it was deleting.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay_s)
    process.kill()
    calls, deleting = 0, ""
    for line in process.stdout.read().splitlines():
        try:
            facts = json.loads(line)
        except ValueError:  # the last line, in part
            continue
        if "tokens" in facts:
            texts[facts["id"]] = facts["tokens"]
            calls += 1
        elif "deleting" in facts:
            deleting = facts["deleting"]
        elif "deleted" in facts:
            texts.pop(facts["deleted"], None)
            deleting = ""
    process.wait()
    process.stdout.close()
    return calls, deleting
