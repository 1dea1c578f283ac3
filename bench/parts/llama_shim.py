"""A pytest plugin for llama.cpp's server tests: `hetero serve` in place of llama-server.

`ServerProcess.start` starts `hetero serve` with what its options mean, behind a proxy that has
llama-server's paths and its `/completion`, mapped on `/v1/completions`. Tests of models that are
not the one of `MODEL` are skipped. With `LENIENT`, sampled text and three fields' spelling count as
equal, so that what a test asserts behind them is reached.
"""

from __future__ import annotations

import atexit
import hashlib
import http.client
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import OrderedDict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

LENIENT: Final = os.environ.get("LENIENT") == "1"
MODEL: Final = Path(os.environ["MODEL"])
TEMPLATES: Final = Path(os.environ["TEMPLATES"])
STORIES: Final = "ggml-org/test-model-stories260K"
MOST: Final = 3  # servers that stay for the next tests
DEADLINE_S: Final = 120.0
# Tests that count tokens, slots or metrics from a server's start have one of their own.
FRESH: Final = (
    *("slot_save", "metrics", "kv_keep", "cached_tokens", "prompt_cache", "sleep", "test_slots"),
    *("cancel", "progress", "no_ui"),
)
BOS_TURNS: Final = "{{ bos_token }}{% for m in messages %}"
NAMED: Final = {
    "chatml": BOS_TURNS
    + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": BOS_TURNS
    + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    + "{% endfor %}{% if add_generation_prompt %}"
    + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "command-r": "{% for m in messages %}<|START_OF_TURN_TOKEN|><|"
    + "{% if m.role == 'assistant' %}CHATBOT{% else %}"
    + "{{ m.role | upper }}{% endif %}_TOKEN|>{{ m.content | trim }}<|END_OF_TURN_TOKEN|>"
    + "{% endfor %}{% if add_generation_prompt %}"
    + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
}
LOCAL: Final = [
    f"http://{host}{port}"
    for host in ("localhost", "127.0.0.1", "[::1]")
    for port in ("", ":3000", ":8080")
]
PASSED_ON: Final = ("authorization", "x-api-key", "content-type", "origin", "accept")
OURS: Final = {
    *("/responses", "/models", "/embeddings", "/chat/completions"),
    "/chat/completions/input_tokens",
}
CHAT: Final = "/v1/chat/completions"


sys.modules["wget"] = types.ModuleType("wget")  # nothing is downloaded


class OtherModelError(Exception):
    """A test wants a model that is not here."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Report a test of another model as skipped."""
    report: Any = yield
    if call.excinfo is not None and call.excinfo.errisinstance(OtherModelError):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"Skipped: other model {call.excinfo.value}")
    return report


def pytest_collection() -> None:
    """Put the servers here in the place of llama.cpp's."""
    import utils

    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.ServerProcess.start = start
    utils.ServerProcess.stop = stop


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let every text match where sampled text counts as equal."""
    if LENIENT:
        for module in {item.module for item in items}:  # type: ignore[attr-defined]
            module.match_regex = lambda _regex, text: isinstance(text, str)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


WORK: Final = Path(tempfile.mkdtemp(prefix="llama-tests-"))
KEPT: OrderedDict[tuple[str, ...], Hetero] = OrderedDict()


@atexit.register
def stop_all() -> None:
    """End the servers that stay, and delete what they wrote."""
    for hetero in KEPT.values():
        hetero.stop()
    shutil.rmtree(WORK, ignore_errors=True)


def directory_with(alias: str, template: str) -> Path:
    """Return a directory of the model under a name, with a chat template, made on first use."""
    made = WORK / hashlib.sha256(template.encode()).hexdigest()[:10] / alias.replace("/", "_")
    if not made.exists():
        made.mkdir(parents=True)
        for name in ("model.safetensors", "tokenizer.json"):
            shutil.copy(MODEL / name, made / name)
        for name, also in (
            ("config.json", {"max_position_embeddings": 8192}),
            ("tokenizer_config.json", {"chat_template": template}),
        ):
            record = json.loads((MODEL / name).read_text(encoding="utf-8"))
            (made / name).write_text(json.dumps(record | also), encoding="utf-8")
    return made


class Hetero:
    """`hetero serve` with some options, once `/health` answers."""

    def __init__(self, options: tuple[str, ...], key: str | None) -> None:
        self.port = free_port()
        own = WORK / f"run-{self.port}"
        own.mkdir()
        options += ("--port", str(self.port), "--directory", str(own / "contexts"))
        if key:
            (own / "keys").write_text(f"app {hashlib.sha256(key.encode()).hexdigest()}\n")
            (own / "keys").chmod(0o600)
            options += ("--keys", str(own / "keys"))
        self.log = own / "log"
        command = [sys.executable, "-P", "-m", "hetero.start", "serve", *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline_s = time.monotonic() + DEADLINE_S
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise RuntimeError(f"hetero did not start: {self.log.read_text()[-600:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


def options_of(server: Any) -> tuple[str, ...]:
    """Return the options of `hetero serve` that mean what a test asks of llama-server."""
    template = NAMED.get(server.chat_template or "chatml", server.chat_template)
    if server.chat_template_file:
        template = (TEMPLATES / Path(server.chat_template_file).name).read_text(encoding="utf-8")
    slots, context = server.n_slots or 4, server.n_ctx or 4096
    each = context if server.kv_unified else context // slots
    model = directory_with((server.model_alias or "tinyllama-2").split(",")[0], template)
    local = server.cors_origins == "localhost" or server.server_tools
    origins = [x for origin in (LOCAL if local else ["*"]) for x in ("--allow-origin", origin)]
    options = [model, "--device", "npu", "--alias", "*", "--weights", "f32", "--kv", "f32"]
    options += ["--kv-bits", "raw", "--max-seq-len", each, "--slots", slots, "--parallel", slots]
    options += ["--contexts-per-app", 1000, *origins]
    if server.sleep_idle_seconds is not None:
        options += ["--sleep-idle-seconds", server.sleep_idle_seconds]
    if server.pooling in ("last", "mean"):
        options += ["--pooling", server.pooling]
    return tuple(map(str, options))


def server_for(server: Any, *, fresh: bool) -> Hetero:
    """Return a server with these options, one that runs already where that will do."""
    options = options_of(server)
    if fresh:
        return Hetero(options, server.api_key)
    name = (*options, server.api_key or "")
    if name not in KEPT or KEPT[name].process.poll() is not None:
        while len(KEPT) >= MOST:
            KEPT.popitem(last=False)[1].stop()
        KEPT[name] = Hetero(options, server.api_key)
    KEPT.move_to_end(name)
    return KEPT[name]


def start(server: Any, timeout_seconds: int = 0) -> None:
    """Start what stands for a `ServerProcess`."""
    del timeout_seconds
    import utils

    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    router = not (server.model_hf_repo or server.model_hf_file or server.model_file)
    wanted = "router" if router else server.model_hf_repo
    if wanted != STORIES and not (router and "cors" in test):
        raise OtherModelError(wanted)
    fresh = any(part in test for part in FRESH)
    hetero = server_for(server, fresh=fresh)
    mapped = {"settings": server, "hetero": hetero, "salt": str(time.time())}
    handler = type("Handler", (Proxy,), mapped)
    proxy = ThreadingHTTPServer(("127.0.0.1", server.server_port), handler)
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, args=(0.05,), daemon=True).start()
    server.stand_in = proxy, hetero if fresh else None
    server.ready = True
    utils.server_instances.add(server)


def stop(server: Any) -> None:
    """End what stands for a `ServerProcess`."""
    import utils

    proxy, own = server.__dict__.pop("stand_in", (None, None))
    if proxy is not None:
        proxy.shutdown()
        proxy.server_close()
    if own is not None:
        own.stop()
    utils.server_instances.discard(server)


class GoneError(Exception):
    """The client left before the answer began."""


class Proxy(BaseHTTPRequestHandler):
    """One request: passed on to `hetero serve`, mapped where llama-server's form is another.

    A thread of its own serves each connection.
    """

    protocol_version = "HTTP/1.1"
    settings: Any
    hetero: Hetero
    salt: str

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Pass a request on."""
        try:
            self._pass_on()
        except (GoneError, BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_POST = do_DELETE = do_OPTIONS = do_GET  # noqa: N815

    def _pass_on(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
        path, mark, query = self.path.partition("?")
        path = f"/v1{path}" if path in OURS else path
        sent: Any = None
        native = self.command == "POST" and path in ("/completion", "/completions")
        try:
            sent = json.loads(raw) if raw else None
        except ValueError:
            native = False
        body = sent
        if isinstance(sent, dict) and self.command == "POST":
            body = self._with_defaults(dict(sent), path, native=native)
            raw = json.dumps(body).encode()
        path = "/v1/completions" if native else path
        counts = LENIENT and path == f"{CHAT}/input_tokens"
        path = "/tokenize" if counts else path
        response = self._ask(path + mark + query, raw)
        if response.status == 200 and "event-stream" in (response.getheader("content-type") or ""):
            self._stream(response, Completion(self.settings, sent, body) if native else None)
            return
        data = response.read()
        if response.status == 200 and native:
            answer = Completion(self.settings, sent, body).whole(json.loads(data))
            data = json.dumps(answer).encode()
        elif response.status == 200 and LENIENT and path in (CHAT, "/v1/completions"):
            record = lenient(json.loads(data))
            if self.settings.debug:
                record["__verbose"] = json.loads(self._ask("/apply-template", raw).read())
            data = json.dumps(record).encode()
        elif response.status == 200 and counts:
            data = json.dumps({"input_tokens": json.loads(data)["count"]}).encode()
        self.send_response(response.status)
        skipped = ("content-length", "transfer-encoding", "connection", "date", "server")
        for name, value in response.getheaders():
            if name.lower() not in skipped:
                self.send_header(name.title(), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _with_defaults(self, body: dict[str, Any], path: str, *, native: bool) -> dict[str, Any]:
        """Return a body with what llama-server's command line gives every request."""
        if native or path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses"):
            body.setdefault("temperature", self.settings.temperature)
        if native or path in (CHAT, "/v1/completions"):
            body.setdefault("seed", self.settings.seed)
            body.setdefault("cache_salt", self.salt)
            limits = (body.get(x) for x in ("max_tokens", "max_completion_tokens", "n_predict"))
            given = next((x for x in limits if x is not None), None)
            default = -1 if self.settings.n_predict is None else self.settings.n_predict
            if given != 0 or native:
                body["max_tokens"] = default if given is None else given
                body.pop("n_predict", None)
        if self.settings.reasoning in ("on", "off"):
            thinks = {"enable_thinking": self.settings.reasoning == "on"}
            if path in (CHAT, "/apply-template", "/tokenize"):
                body.setdefault("chat_template_kwargs", thinks)
        return Completion.asked(body) if native else body

    def _ask(self, path: str, raw: bytes | None) -> http.client.HTTPResponse:
        """Return the answer once its head is here; `GoneError` if the client leaves before."""
        headers = {
            name: value
            for name, value in self.headers.items()
            if name.lower() in PASSED_ON or name.lower().startswith("access-control-request-")
        }
        own = http.client.HTTPConnection("127.0.0.1", self.hetero.port, timeout=DEADLINE_S)
        own.request(self.command, path, body=raw, headers=headers)
        while True:
            ready, _, _ = select.select([own.sock, self.connection], [], [], DEADLINE_S)
            if own.sock in ready:
                return own.getresponse()
            if not ready or not self.connection.recv(1, socket.MSG_PEEK):
                own.close()
                raise GoneError

    def _stream(self, response: http.client.HTTPResponse, native: Completion | None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for line in response:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else None
            if event is not None and native is not None:
                event = native.event(event)
            elif event is not None and LENIENT:
                event = lenient(event)
            shown = line if event is None else b"data: " + json.dumps(event).encode() + b"\n"
            if event != {}:
                self.wfile.write(shown)
                self.wfile.flush()
        response.close()


def lenient(event: dict[str, Any]) -> dict[str, Any]:
    """Return an answer, or an event of one, with llama.cpp's spelling of two fields."""
    if "system_fingerprint" in event:
        event["system_fingerprint"] = f"b{event['system_fingerprint']}"
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        if delta.get("role") and delta.get("content") == "":
            delta["content"] = None
    return event


def pieces() -> dict[str, int]:
    """Return the ids of the model's tokens by their text."""
    vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    ids: dict[str, int] = {}
    for piece, number in vocabulary.items():
        ids.setdefault(piece.replace("\u2581", " "), number)
        if piece.startswith("<0x"):
            ids.setdefault(bytes([int(piece[3:5], 16)]).decode("latin1"), number)
    return ids


IDS: Final = pieces()


class Completion:
    """llama-server's `/completion`: a request for `/v1/completions`, and its answer turned back."""

    def __init__(self, settings: Any, sent: dict[str, Any], body: dict[str, Any]) -> None:
        self.settings, self.sent, self.body = settings, sent, body
        self.last: dict[str, Any] = {}

    @staticmethod
    def asked(body: dict[str, Any]) -> dict[str, Any]:
        """Return the body for `/v1/completions`."""
        if body.get("n_probs"):
            body["logprobs"] = body["n_probs"]
        elif body.get("return_tokens") or body.get("stream"):
            body["logprobs"] = 0
        prompt = body.get("prompt")
        if isinstance(prompt, dict) and "multimodal_data" not in prompt:
            body["prompt"] = prompt.get("prompt_string")
        if isinstance(body.get("logit_bias"), list):
            body["logit_bias"] = {str(token): bias for token, bias in body["logit_bias"]}
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
        return body

    def whole(self, answer: dict[str, Any]) -> Any:
        """Return llama-server's answer; a list of several choices."""
        many = [self._one(choice, answer) for choice in answer["choices"]]
        return many[0] if len(many) == 1 else many

    def event(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return llama-server's event; an empty one where it has none."""
        if "choices" not in event:
            return event
        if not event["choices"]:
            return self._one(self.last, event) | {"content": ""}
        (choice,) = event["choices"]
        if choice["finish_reason"]:
            self.last = choice
            return {}
        logprobs = choice["logprobs"] or {"tokens": []}
        tokens = [IDS.get(token, 0) for token in logprobs["tokens"]]
        record = {"content": choice["text"], "stop": False, "tokens": tokens}
        if self.sent.get("n_probs"):
            record["completion_probabilities"] = self._probabilities(logprobs)
        return record

    def _one(self, choice: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        usage, limited = answer["usage"], choice["finish_reason"] == "length"
        cached, count = usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
        logprobs = choice.get("logprobs") or {"tokens": []}
        first_ms = 1e3 * answer["hetero"].get("ttft_s", 1e-3)
        record = {
            "content": choice["text"],
            "stop": True,
            "stop_type": "limit" if limited else "eos",
            "tokens": [IDS.get(x, 0) for x in logprobs["tokens"]]
            if self.sent.get("return_tokens")
            else [],
            "prompt": self.sent.get("prompt"),
            "truncated": limited and self.body["max_tokens"] == -1,
            "has_new_line": "\n" in choice["text"],
            "generation_settings": {
                "n_predict": self.body["max_tokens"],
                "seed": self.body["seed"],
                "temperature": self.body["temperature"],
                **dict.fromkeys(("adaptive_target", "adaptive_decay"), 0),
                "logit_bias": [{"bias": None, "token": 2}] if self.body.get("ignore_eos") else [],
            },
            "timings": {
                "cache_n": cached,
                "prompt_n": usage["prompt_tokens"] - cached,
                "predicted_n": count,
                **dict.fromkeys(("prompt_ms", "prompt_per_token_ms"), first_ms),
                **dict.fromkeys(("prompt_per_second", "predicted_ms"), 1.0),
                **dict.fromkeys(("predicted_per_second", "predicted_per_token_ms"), 1.0),
            },
        }
        if self.sent.get("n_probs"):
            record["completion_probabilities"] = self._probabilities(logprobs)
        return record

    @staticmethod
    def _probabilities(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
        def one(text: str, value: float) -> dict[str, Any]:
            known = {"id": IDS.get(text, 0), "token": text, "bytes": list(text.encode())}
            return known | {"logprob": value}

        rows = []
        tops = logprobs["top_logprobs"] or [{}] * len(logprobs["tokens"])
        for text, value, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True
        ):
            best = sorted((top or {}).items(), key=lambda pair: -pair[1])[:10]
            rows.append(one(text, value) | {"top_logprobs": [one(*pair) for pair in best]})
        return rows
