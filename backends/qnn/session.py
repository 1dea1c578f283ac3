"""QNN sessions that never run on the CPU, their errors, and memory bound to them.

Two fallbacks are closed here: ONNX Runtime's own (`session.disable_cpu_ep_fallback`) and that of
its Python wrapper (`enable_fallback`); afterwards the assignment of every node is checked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from hetero.backends.errors import DeviceError
from hetero.backends.onnx_common.binding import NATIVE_ERRORS
from hetero.backends.qnn.library import BACKEND, PROVIDER, Library
from hetero.backends.snapdragon import Chip

SILENT = 4
NOT_ON_NPU = "NOT_ON_NPU"
CONTEXT_ENABLE = "ep.context_enable"  # in the config of a session that compiles
# Optimisation of finalised graphs; 1 re-reads large weights and fails for some shapes (measured).
FINALIZATION_MODE = "3"

SETUP_FAILED = "QNN SetupBackend failed"
# What the provider's messages and codes mean. The first pattern that matches decides.
REMEDIES: tuple[tuple[str, str, str], ...] = (
    (
        r"Code: 1002|MEM_ALLOC|\b1002\b",
        "QNN_COMMON_ERROR_MEM_ALLOC (1002)",
        "the graph is too large: use a smaller graph size or fewer rows; on a device also: its "
        "process is full, or the skeleton library is missing (`hetero doctor`)",
    ),
    (
        r"\b1007\b|SYSTEM_COMMUNICATION|SSR detected",
        "QNN_COMMON_ERROR_SYSTEM_COMMUNICATION (1007)",
        "the NPU's process died or was restarted: open the model again; if it stays, reboot",
    ),
    (
        r"\b1008\b|INCOMPATIBLE_BINARIES",
        "QNN_COMMON_ERROR_INCOMPATIBLE_BINARIES (1008)",
        "the library that runs on the Hexagon (skeleton) is of another version or cannot be "
        "loaded: `hetero doctor` compares them; clear ADSP_LIBRARY_PATH and LD_LIBRARY_PATH of "
        "other SDKs",
    ),
    (
        r"\b1009\b|LOADING_BINARIES",
        "QNN_COMMON_ERROR_LOADING_BINARIES (1009)",
        "a library that QNN needs cannot be loaded (the compiler libQnnHtpPrepare, or the stub or "
        "skeleton of this Hexagon): reinstall onnxruntime-qnn, and load no other SDK in this "
        "process",
    ),
    (
        r"\b5000\b|CONTEXT_ERROR_(INVALID_ARGUMENT|UNSUPPORTED|BINARY)",
        "QNN_CONTEXT_ERROR_INVALID_ARGUMENT (5000)",
        "the compiled graph is for another SDK or chip: compile it again with `hetero compile`",
    ),
    (
        r"\b5005\b|CREATE_FROM_BINARY|context binary",
        "QNN_CONTEXT_ERROR_CREATE_FROM_BINARY (5005)",
        "the compiled graph cannot be opened: compile it again for this chip and SDK",
    ),
    (
        r"\b14001\b|INVALID_CONFIG|Failed to create device",
        "QNN_DEVICE_ERROR_INVALID_CONFIG (14001)",
        "the chip is unknown to this SDK, or the skeleton library for its Hexagon is missing: "
        "check --soc and ADSP_LIBRARY_PATH",
    ),
    (
        r"BACKEND_ERROR_CANNOT_INITIALIZE",
        "QNN_BACKEND_ERROR_CANNOT_INITIALIZE",
        "the Hexagon does not start: its firmware must run, and this user open its device node; "
        "`hetero doctor` checks both, and the skeleton library",
    ),
    (
        SETUP_FAILED,
        "BACKEND_NOT_SET_UP",
        "a library that QNN needs cannot be loaded: reinstall onnxruntime-qnn, and load no other "
        "SDK in this process",
    ),
    (
        r"fallback to CPU EP has been explicitly disabled",
        NOT_ON_NPU,
        "QNN refused a node of the graph; nothing was run on the CPU. Run `hetero doctor`",
    ),
)
REPORT = "report it with this line"


@dataclass(frozen=True)
class Target:
    """Target of sessions: the libraries and, off the device, the chip."""

    library: Library
    chip: Chip
    shared_memory: bool = False

    def options(self) -> dict[str, str]:
        """Return provider options.

        Misspelt ones are ignored without a word, so they are written once.
        """
        options = {
            "backend_path": str(self.library.path),
            "soc_model": str(self.chip.soc_model),
            "htp_arch": str(self.chip.htp_arch),
            "enable_htp_fp16_precision": "1",
            "htp_performance_mode": "burst",
            "htp_graph_finalization_optimization_mode": FINALIZATION_MODE,
        }
        if self.shared_memory:
            options["enable_htp_shared_memory_allocator"] = "1"
        return options


def new_session(
    target: Target,
    model: bytes | Path,
    what: str,
    *,
    config: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    log_severity: int = SILENT,
) -> ort.InferenceSession:
    """Compile a model, or open a compiled one, with every node on the NPU.

    `config` are further session config entries, `options` further provider options. Raises
    `DeviceError` that names `what`, the native code and the remedy.
    """
    settings = _settings(target, config or {}, options or {})
    settings.log_severity_level = log_severity
    if isinstance(model, Path) and CONTEXT_ENABLE not in (config or {}):
        # Compiled already: looking for optimisations only holds memory (40 KiB a graph).
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = str(model) if isinstance(model, Path) else model
    try:
        session = ort.InferenceSession(source, settings, enable_fallback=0)
    except NATIVE_ERRORS as error:
        raise device_error(error, what) from error
    check_assignment(session, what)
    return session


def _settings(
    target: Target, config: Mapping[str, str], options: Mapping[str, str]
) -> ort.SessionOptions:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    settings.inter_op_num_threads = 1
    settings.enable_cpu_mem_arena = False
    settings.enable_mem_pattern = False
    entries = {
        "session.disable_cpu_ep_fallback": "1",
        "session.record_ep_graph_assignment_info": "1",
        "session.intra_op.allow_spinning": "0",
        **config,
    }
    for key, value in entries.items():
        settings.add_session_config_entry(key, value)
    settings.add_provider_for_devices(list(target.library.devices), {**target.options(), **options})
    return settings


def check_assignment(session: ort.InferenceSession, what: str) -> None:
    """Raise `DeviceError` unless every node of the session is on the NPU."""
    assigned = {group.ep_name for group in session.get_provider_graph_assignment_info()}
    if assigned != {PROVIDER}:
        others = ", ".join(sorted(assigned - {PROVIDER})) or "nothing"
        raise DeviceError(BACKEND, what, f"NOT_ON_NPU: nodes were given to {others}", REPORT)


def logged_cause(log: str, what: str) -> DeviceError | None:
    """Return why QNN was not set up, from what ONNX Runtime logged; None if it was.

    The exception of such a session says only that its nodes are not on the NPU.
    """
    failure = re.search(rf"\] ({SETUP_FAILED}[^\x1b\n]*)", log)
    return None if failure is None else device_error(RuntimeError(failure.group(1)), what)


def device_error(error: Exception, what: str) -> DeviceError:
    """Return the provider's message with the native code by name, its cause and the remedy."""
    text = " ".join(str(error).split())
    for pattern, code, remedy in REMEDIES:
        if re.search(pattern, text):
            return DeviceError(BACKEND, what, f"{code}: {_short(text)}", remedy)
    return DeviceError(BACKEND, what, f"{type(error).__name__}: {_short(text)}", REPORT)


def _short(text: str) -> str:
    """Return the message without ONNX Runtime's preamble and source locations."""
    match = re.search(r"\[ONNXRuntimeError\] : \d+ : \w+ : (.*)", text)
    plain = re.sub(r"/\S+\.(cc|h):\d+ \S+( \[[^]]*\])?", "", match.group(1) if match else text)
    return plain.strip()[:240]
