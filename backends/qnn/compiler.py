"""The compiler in a child process: what it allocates, several times a graph's weights, returns.

The child is started on the first compilation, takes one job a line on its standard input and
answers one line each, and is replaced when it has grown. The library prints on standard output, so
the child answers on a descriptor of its own and gives the library none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from hetero.backends.errors import DeviceError
from hetero.backends.qnn.library import BACKEND, ERRORS, load
from hetero.backends.qnn.session import (
    CONTEXT_ENABLE,
    NOT_ON_NPU,
    Target,
    logged_cause,
    new_session,
)
from hetero.backends.snapdragon import Chip

# A child that holds more than this after a job is replaced before the next one.
LARGEST_CHILD_BYTES = 1 << 30
# A child that has waited this long for a job ends, and its memory returns.
IDLE_S = 20.0
ENDING_S = 10.0  # for a child whose input has ended
SHARE_CONFIG = {"ep.share_ep_contexts": "1"}
LAST_SHARE_CONFIG = {"ep.stop_share_ep_contexts": "1"}
CONTEXT_CONFIG = {CONTEXT_ENABLE: "1", "ep.context_embed_mode": "0"}


class GraphCompiler:
    """Compiles models into context binaries, one at a time. Raises `DeviceError`."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._child: subprocess.Popen[str] | None = None
        self._said: IO[bytes] | None = None  # what the child writes to stderr

    def compile(
        self, model: bytes, output: Path, what: str, *, options: Mapping[str, str] | None = None
    ) -> float:
        """Write `output` (an ONNX file) and its `_qnn.bin` from a serialised model.

        `options` are further provider options. Returns the seconds that the compiler took.
        """
        return self._compile({output: model}, what, options or {})

    def compile_shared(self, models: Mapping[Path, bytes], what: str) -> float:
        """Write several graphs of the same weights, ONNX files by path, around one binary.

        The binary is named after the first.
        """
        return self._compile(models, what, {})

    def _compile(
        self, models: Mapping[Path, bytes], what: str, options: Mapping[str, str]
    ) -> float:
        # Next to the outputs: what a killed process leaves is removed with them.
        place = next(iter(models)).parent
        with tempfile.TemporaryDirectory(prefix=".sources-", dir=place) as folder:
            sources = {}
            for i, (output, model) in enumerate(models.items()):
                source = Path(folder) / f"source{i}.onnx"
                source.write_bytes(model)
                sources[str(output)] = str(source)
            answer = self._ask({"sources": sources, "options": dict(options)}, what)
        if "error" in answer:
            fields = answer["error"]
            if fields["code"].startswith(NOT_ON_NPU) and (cause := self._logged_cause(what)):
                raise cause
            raise DeviceError(BACKEND, what, fields["code"], fields["remedy"])
        if answer["resident_bytes"] > LARGEST_CHILD_BYTES:
            self.close()
        return float(answer["seconds"])

    def close(self) -> None:
        """End the child; idempotent."""
        child, self._child = self._child, None
        said, self._said = self._said, None
        if said is not None:
            said.close()
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        try:
            child.wait(ENDING_S)
        except subprocess.TimeoutExpired:  # in the middle of a graph
            child.kill()
            child.wait()
        child.stdout.close()

    def __del__(self) -> None:
        self.close()

    def _ask(self, job: dict[str, Any], what: str) -> dict[str, Any]:
        for _ in range(2):  # the child may end, idle, while a job is sent
            line, code, words = self._exchange(json.dumps(job) + "\n")
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
            if code:
                break
        died = f"by signal {-code}" if code < 0 else f"with code {code}"
        died += f" ({words})" if words else ""
        raise DeviceError(
            BACKEND,
            what,
            f"COMPILER_DIED: the compiling process ended {died}",
            "free memory or use smaller graph sizes; else report it with this line",
        )

    def _exchange(self, job: str) -> tuple[str, int, str]:
        """Return the answer to a job.

        Else "", the code that the child ended with and its last words.
        """
        if self._child is None or self._child.poll() is not None:
            self.close_quietly()
            # Closed with the child. Unbuffered: both processes have one offset in it.
            self._said = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            self._child = _start(self._target, self._said)
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(job)
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:  # Ctrl-C: the job is not waited for
            child.kill()
            self.close_quietly()
            raise
        if line:
            return line, 0, ""
        code, words = child.wait(), _last_line(self._said)
        self.close_quietly()
        return "", code, words

    def _logged_cause(self, what: str) -> DeviceError | None:
        """Return why QNN was not set up, which the waiting child has logged."""
        if self._said is None:
            return None
        self._said.seek(0)
        log = self._said.read().decode("utf-8", "replace")  # the child appends: its offset is this
        return logged_cause(log, what)

    def close_quietly(self) -> None:
        """Close after the child has died, when its pipes may be broken."""
        try:
            self.close()
        except OSError:
            self._child = None


def _last_line(said: IO[bytes] | None) -> str:
    """Return the end of what a child said: the last line of a traceback, for one."""
    if said is None:
        return ""
    said.seek(max(0, said.seek(0, os.SEEK_END) - 1000))
    lines = said.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _start(target: Target, said: IO[bytes]) -> subprocess.Popen[str]:
    about = {"chip": asdict(target.chip), "library": str(target.library.path)}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()", json.dumps(about)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,  # tracebacks and the library's chatter are nothing for a terminal
        text=True,
        encoding="utf-8",
    )


def serve() -> None:
    """Serve as the child: jobs in, answers out, until the input ends or is silent for a while."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    fields = json.loads(sys.argv[1])
    target = Target(load(fields["library"]), Chip(**fields["chip"]))
    timer = _leave_when_idle()
    for line in sys.stdin:
        timer.cancel()
        answers.write(json.dumps(_answer(target, json.loads(line))) + "\n")
        answers.flush()
        timer = _leave_when_idle()


def _leave_when_idle() -> threading.Timer:
    timer = threading.Timer(IDLE_S, os._exit, (0,))
    timer.daemon = True
    timer.start()
    return timer


def _answer(target: Target, job: dict[str, Any]) -> dict[str, Any]:
    sources: dict[str, str] = job["sources"]
    first, *_, last = *sources, list(sources)[-1]
    os.chdir(Path(first).parent)  # schematics are written to the working directory
    start = time.perf_counter()
    sessions = []
    try:
        for output, source in sources.items():
            config = {**CONTEXT_CONFIG, "ep.context_file_path": output}
            if len(sources) > 1:
                config |= SHARE_CONFIG | (LAST_SHARE_CONFIG if output == last else {})
            sessions.append(
                new_session(
                    target,
                    Path(source),
                    "",
                    config=config,
                    options=job["options"],
                    log_severity=ERRORS,
                )
            )
    except DeviceError as error:
        return {"error": {"code": error.code, "remedy": error.remedy}}
    finally:
        seconds = time.perf_counter() - start
        os.chdir(Path(__file__).parent)
    return {"resident_bytes": resident_bytes(), "seconds": seconds}


def resident_bytes() -> int:
    """Return the memory of this process; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
