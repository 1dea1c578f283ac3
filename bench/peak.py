"""Peak memory of opening GGUF files, anonymous and mapped, relative to their size.

python bench/peak.py a.gguf b.gguf --device gpu

Each file is opened in two processes, which answer with one token: the first also packs what the
second maps. Counted is what is beyond an open `demo`, with its devices and libraries; `pool` is
what the model's activations and context take at most, whatever the file's size.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from common import MIB, finish, one_command, table

HEAD = "file|start|MiB|peak anonymous, × file|peak mapped|peak of both|open|pool"
MEASURE = """
import sys, threading, time
import hetero

def kilobytes():
    fields = dict(x.split(":", 1) for x in open("/proc/self/status"))
    return [int(fields[x].split()[0]) for x in ("RssAnon", "RssFile")]

path, device, weights, context = sys.argv[1:]
with hetero.LLM("demo", device=device) as demo:
    demo.generate([5], max_tokens=1)
    before, peaks, ended = kilobytes(), [], threading.Event()

    def sample():
        while not ended.wait(2e-3):
            peaks.append(kilobytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    with hetero.LLM(path, device=device, weights=weights or None, max_seq_len=int(context)) as llm:
        llm.generate([5, 6, 7], max_tokens=1)
        last, needs = kilobytes(), llm.engine.memory
    ended.set()
    thread.join()
    most = [max(x[i] for x in peaks) - before[i] for i in (0, 1)]
    pool = (needs.pool_bytes + needs.contexts * needs.context_bytes) // 1024
    print(*most, max(sum(x) for x in peaks) - sum(before), sum(last) - sum(before), pool)
"""


def peak_memory(
    files: list[Path],
    device: str = "auto",
    weights: Annotated[str, typer.Option(help="default: as the file stores them")] = "",
    context: Annotated[int, typer.Option(help="tokens of the context")] = 256,
) -> None:
    """Peak resident memory of opening files, over their size."""
    rows = []
    for path in files:
        for start in ("first", "later"):
            arguments = [sys.executable, "-P", "-c", MEASURE, str(path), device, weights]
            arguments.append(str(context))
            done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
            size = path.stat().st_size
            sizes = (f"{1024 * int(x) / size:.2f}" for x in done.stdout.split()[-5:])
            rows.append([path.name, start, f"{size / MIB:.0f}", *sizes])
    table(HEAD, rows)
    finish()


app = one_command(peak_memory)

if __name__ == "__main__":
    app()
