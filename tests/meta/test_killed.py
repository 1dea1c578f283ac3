"""kill -9 while a model is quantised and a session saved: the destination is whole or not there.

`HETERO_KILLS=200 pytest tests/meta/test_killed.py` kills as often as one likes.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetero import LLM
from hetero.models import open_model
from hetero.models.quantized import save
from tests.support import tiny_files

KILLS = int(os.environ.get("HETERO_KILLS", "4"))
LONGEST_S = 0.12  # a few rounds of the child's loop
CHILD = """
import sys
from hetero import LLM
from hetero.models.quantized import save
folder = sys.argv[1]
llm = LLM(f"{folder}/model", device="npu")
llm.generate("hi", max_tokens=2)
print("ready", flush=True)
while True:
    llm.save_session(f"{folder}/session")
    save(llm.model.weights, f"{folder}/out", overwrite=True)
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_kill_leaves_whole_files_or_none(tmp_path: Path) -> None:
    chance = random.Random(5)
    session, out = tmp_path / "session", tmp_path / "out"
    model = str(tiny_files.write_directory(tmp_path / "model"))
    seen = 0
    with LLM(model, device="npu") as llm:
        for _ in range(KILLS):
            kill_after(chance.uniform(0.0, LONGEST_S), tmp_path)
            if session.exists():
                llm.load_session(session)
                assert len(llm.context) > 1
                seen += 1
            if out.exists():
                open_model(out, verify=True).weights.block(0)
                seen += 1
            if chance.random() < 0.5:
                session.unlink(missing_ok=True)
                shutil.rmtree(out, ignore_errors=True)
        assert seen, "no kill came after the first whole file"
        llm.generate("hi", max_tokens=2)
        llm.save_session(session)
        save(llm.model.weights, out, overwrite=True)
    # What the killed ones left was removed by those that came after them.
    assert {x.name for x in tmp_path.iterdir()} == {"model", "session", "out"}


def kill_after(delay_s: float, folder: Path) -> None:
    """Start the child, wait until it saves, kill it."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay_s)
    process.kill()
    process.wait()
    process.stdout.close()
