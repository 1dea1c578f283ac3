"""Children that `os.fork` makes: one clear error or the right answer, never a hang."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from hetero.backends.errors import DeviceError, DeviceLostError, WaitTimeoutError
from hetero.models import ModelError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
LIMIT_S = 60
PARENT = """
import os, sys, warnings
from hetero import LLM
warnings.simplefilter("always")
warnings.filterwarnings("ignore", category=DeprecationWarning)  # Python's own, of forks
if {mode!r}:
    llm = LLM("demo", device={mode!r})
    expected = llm.generate("Once", max_tokens=5).text
pid = os.fork()
if pid == 0:
    import faulthandler
    faulthandler.dump_traceback_later(20, exit=True)  # a hang
    try:
        {child}
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    sys.exit(0)
_, status = os.waitpid(pid, 0)
print("child ended with", os.waitstatus_to_exitcode(status))
if {mode!r}:
    assert llm.generate("Once", max_tokens=5).text == expected
"""
GENERATE = 'print("right" if llm.generate("Once", max_tokens=5).text == expected else "wrong")'
OWN = (
    f"own = LLM('demo', device={{mode!r}}); "
    f"{GENERATE.replace('llm.', 'own.').replace('expected', repr(' upon a time, there'))}"
)
LOST = "was opened before this process was forked"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def fork(mode: str, child: str) -> subprocess.CompletedProcess[str]:
    done = run(PARENT.format(mode=mode, child=child.replace("{mode!r}", repr(mode))))
    assert done.returncode == 0, done.stderr
    assert "child ended with 0" in done.stdout, done.stdout + done.stderr
    return done


@pytest.mark.full
def test_a_gpu_that_was_opened_before_is_an_error_that_says_so() -> None:
    done = fork("gpu", GENERATE)
    assert "DeviceLostError opencl: using the device failed: it " + LOST in done.stdout
    assert "start processes by spawn" in done.stdout


@pytest.mark.full
def test_of_two_devices_the_npu_goes_on_alone() -> None:
    done = fork("hetero", GENERATE)
    assert "right\n" in done.stdout, done.stdout
    assert done.stderr.count("FallbackWarning: going on with npu") == 1
    assert LOST in done.stderr


@pytest.mark.full
def test_an_npu_works_on() -> None:
    assert "right\n" in fork("npu", GENERATE).stdout


@pytest.mark.full
@pytest.mark.parametrize("mode", ["gpu", "hetero", "npu"])
def test_a_model_of_the_childs_own(mode: str) -> None:
    """OpenCL cannot be opened twice by parent and child; the other device is, with one warning."""
    done = fork(mode, OWN)
    assert "right\n" in done.stdout, done.stdout
    assert done.stderr.count(LOST) == (mode != "npu")


@pytest.mark.full
@pytest.mark.parametrize("mode", ["gpu", "hetero", "npu"])
@pytest.mark.parametrize("child", ["llm.close()", "del llm; import gc; gc.collect()", "pass"])
def test_a_child_closes_and_ends(mode: str, child: str) -> None:
    fork(mode, child)


@pytest.mark.full
def test_a_child_of_a_process_without_opencl_may_use_it() -> None:
    child = "own = LLM('demo', device='gpu'); print(own.generate('Once', max_tokens=5).text)"
    assert " upon a time, there\n" in fork("", child).stdout


@pytest.mark.full
def test_a_pool_hands_the_error_on() -> None:
    code = """
import multiprocessing, warnings
warnings.simplefilter("ignore")
from hetero import LLM
llm = LLM("demo", device="gpu")
def answer(prompt):
    return llm.generate(prompt, max_tokens=2).text
with multiprocessing.get_context("fork").Pool(2) as pool:
    try:
        print(pool.map_async(answer, ["a", "b"]).get(20))
    except Exception as error:
        print(type(error).__name__, error.code)
"""
    assert run(code).stdout == f"DeviceLostError it {LOST}, and its threads are not in the child\n"


STEP = """with llm.engine.lock:
        begun.set()
        ended.wait(30)"""
STREAM = """for _ in llm.stream("Once", max_tokens=5):
        begun.set()
        ended.wait(30)"""
IN_USE = "engine: running the model failed: another thread was using it"


@pytest.mark.full
@pytest.mark.parametrize(
    ("work", "answer"),
    [pytest.param(STEP, IN_USE, id="step"), pytest.param(STREAM, " upon a time", id="stream")],
)
def test_a_fork_in_the_middle_of_another_threads_call(work: str, answer: str) -> None:
    """A thread in a step is not in the child, and would be waited for for ever; the context of a
    stream is left to it, and the child takes another one.
    """
    code = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
from hetero import LLM
llm = LLM("demo", device="npu")
begun, ended = threading.Event(), threading.Event()
def read():
    WORK
thread = threading.Thread(target=read)
thread.start()
begun.wait()
pid = os.fork()
if pid == 0:
    import faulthandler
    faulthandler.dump_traceback_later(20, exit=True)
    try:
        print(llm.generate("Once", max_tokens=3).text, flush=True)
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
ended.set()
thread.join()
print(llm.generate("Once", max_tokens=5).text)
"""
    done = run(code.replace("WORK", work))
    assert done.stdout.startswith(answer), done.stdout + done.stderr
    assert done.stdout.endswith(" upon a time, there\n"), done.stderr


@pytest.mark.full
def test_a_child_uses_the_contexts_that_no_other_thread_was_at_work_on() -> None:
    code = """
import os, threading, warnings
warnings.simplefilter("ignore")
from hetero import LLM
llm = LLM("demo", device="npu")
busy, own = llm.new_context(), llm.new_context()
begun, ended = threading.Event(), threading.Event()
def read():
    for _ in llm.stream("Once", context=busy, max_tokens=5):
        begun.set()
        ended.wait(30)
thread = threading.Thread(target=read)
thread.start()
begun.wait()
stream = llm.stream("Once", context=own, max_tokens=5)
first = next(stream).text
pid = os.fork()
if pid == 0:
    import faulthandler
    faulthandler.dump_traceback_later(20, exit=True)
    print(first + "".join(piece.text for piece in stream), flush=True)
    print(llm.generate("Once", context=llm.new_context(), max_tokens=5).text, flush=True)
    try:
        llm.generate("Once", context=busy, max_tokens=2)
    except Exception as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
ended.set()
thread.join()
"""
    lines = run(code).stdout.splitlines()
    assert lines[:2] == [" upon a time, there"] * 2
    assert lines[2].startswith("engine: running the model failed: another thread was using it")


@pytest.mark.full
def test_parent_and_child_have_contexts_of_their_own() -> None:
    """What a child writes into activations and caches, its parent does not see."""
    code = """
import os, warnings
warnings.simplefilter("ignore")
import numpy as np
from hetero import LLM
from hetero.backends.memory import HostBuffer
buffers = [HostBuffer(1 << 13), HostBuffer(1 << 22, huge=True)]
llm = LLM("demo", device="npu")
stream = llm.stream("Once upon a time", max_tokens=20)
first = next(stream).text
pid = os.fork()
if pid == 0:
    for buffer in buffers:
        buffer.bytes[:] = 1
    cache = llm.context.cache
    tensors = [llm.engine.deployment.pool[slot] for slot in llm.engine.deployment.pool.slots()]
    for tensor in tensors + [cache[slot] for slot in cache.layout.slots]:
        tensor.array.reshape(-1)[:1000] = 7
    os._exit(0)
os.waitpid(pid, 0)
text = first + "".join(piece.text for piece in stream)
print(not any(buffer.bytes.any() for buffer in buffers))
print(text == llm.generate("Once upon a time", max_tokens=20).text)
"""
    assert run(code).stdout == "True\nTrue\n"


@pytest.mark.parametrize(
    "error",
    [
        DeviceError("opencl", "launching", "CL_OUT_OF_RESOURCES", "close other programs"),
        DeviceLostError("opencl", "using", "it was closed"),
        WaitTimeoutError("opencl", "MatMul", 3.0, "gpu"),
        ModelError("there is no such model"),
    ],
)
def test_errors_go_from_process_to_process(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_what_threads_open_at_once_is_all_told_of_a_fork() -> None:
    code = """
import os, sys, threading
from hetero.backends.host import forks
sys.setswitchinterval(1e-6)
class Watcher:
    forked = False
    def __init__(self):
        forks.in_child(self.note)
    def note(self):
        self.forked = True
watchers = []
def work():
    watchers.extend(Watcher() for _ in range(2000))
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
del watchers[::2]
pid = os.fork()
if pid == 0:
    print(len(watchers), all(watcher.forked for watcher in watchers), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(len(forks._watching))
"""
    assert run(code).stdout == "4000 True\n4000\n"
