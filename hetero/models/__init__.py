"""Opens a MODEL: packed weights, a tokenizer and shapes.

`open_model` takes what a user types: a Hugging Face directory, a GGUF file, a directory written by
`hetero quantize`, `demo`, or `random:NAME`.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from hetero.backends.formats import DEFAULT_CACHE, CacheFormat, WeightFormat
from hetero.backends.host.background import Background, in_background
from hetero.backends.host.folders import expand_user
from hetero.errors import ModelError
from hetero.models import hub, package_index, quantized
from hetero.models.architectures import ARCHITECTURES
from hetero.models.chat_template import Message
from hetero.models.checkpoint import CheckpointWeights, has_mxfp4, has_weights
from hetero.models.config import ModelConfig
from hetero.models.converted import ConvertedWeights
from hetero.models.graph import model_graph
from hetero.models.manifest import MANIFEST_FILE, Manifest, is_quantised, read_manifest
from hetero.models.model_weights import BlockWeights, ModelWeights
from hetero.models.split_files import model_name
from hetero.models.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer
from hetero.profiler.model_graph import ModelGraph

__all__ = [
    "BlockWeights",
    "LoadedModel",
    "ModelConfig",
    "ModelError",
    "ModelWeights",
    "Tokenizer",
    "default_weights",
    "model_spec",
    "open_model",
]

DEMO_DIRECTORY = Path(__file__).parent / "demo"
RANDOM_PREFIX = "random:"
AUTO = "auto"  # of `weights`: what is stored
LONGEST_NAME = 255  # characters, of every common file system


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """An opened model.

    `name` is for people. `fingerprint` changes whenever the weights may have changed: it is part of
    the key of everything that is derived from them. `source` is the directory or GGUF file, None if
    generated. With `byte_tokenizer` a prompt's bytes are its ids (random models).
    """

    name: str
    config: ModelConfig
    weights: ModelWeights
    fingerprint: str
    source: Path | None = None
    byte_tokenizer: bool = False

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, read on first use or by `reading_tokenizer`.

        Raises `ModelError`.
        """
        return self._tokenizer.result()

    def for_context(self, length: int) -> LoadedModel:
        """Return the model in a context of up to `length` tokens, which LongRoPE depends on.

        The fingerprints differ, so nothing derived from one is used for the other.
        """
        config = self.config.for_context(length)
        if config == self.config:
            return self
        self.weights.config = config
        ropes = f"{config.rope_scaling}{config.layer_ropes or ''}"
        identity = hashlib.sha256(f"{self.fingerprint}|{ropes}".encode())
        return replace(self, config=config, fingerprint=identity.hexdigest())

    def first_layers(self, layers: int) -> LoadedModel:
        """Return the model's first layers with its output head. Raises `ModelError`.

        The fingerprints differ, as in `for_context`.
        """
        from hetero.models.first_layers import FirstLayers, first_layers

        config = first_layers(self.config, layers, self.name)
        identity = hashlib.sha256(f"{self.fingerprint}|first {layers} layers".encode())
        return replace(
            self,
            config=config,
            weights=FirstLayers(self.weights, config),
            fingerprint=identity.hexdigest(),
        )

    def reading_tokenizer(self) -> LoadedModel:
        """Return the model, whose tokenizer a thread begins to read.

        Large vocabularies take half a second.
        """
        _ = self._tokenizer
        return self

    @cached_property
    def _tokenizer(self) -> Background[Tokenizer]:
        return in_background("hetero-tokenizer", [self._read_tokenizer])[0]

    def _read_tokenizer(self) -> Tokenizer:
        if self.byte_tokenizer or self.source is None:
            return ByteTokenizer(self.config.vocab_size)
        if self.source.is_file():
            return gguf_tokenizer(self.source)
        return HfTokenizer.from_directory(self.source)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt.

        Raises `ModelError` if the tokenizer is another model's.
        """
        return self._checked(self.tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, as `encode` does."""
        return self._checked(self.tokenizer.encode_chat(messages))

    def _checked(self, ids: list[int]) -> list[int]:
        vocabulary = self.config.vocab_size
        bad = next((x for x in ids if not 0 <= x < vocabulary), None)
        if bad is not None:
            raise ModelError(
                f"{self.name}: the tokenizer gives the token id {bad}, but the model has a "
                f"vocabulary of {vocabulary}: the tokenizer does not belong to it; download both "
                "again"
            )
        return ids

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the ids that end a text: the configuration's and the tokenizer's.

        A configuration often has only the end of a text, where the tokenizer knows the token that
        ends a turn of a chat.
        """
        try:
            named = self.tokenizer.eos_ids
        except ModelError:  # prompts of token ids need no tokenizer
            if not self.config.eos_ids:
                raise
            return self.config.eos_ids
        ends = dict.fromkeys((*self.config.eos_ids, *named))
        return tuple(id_ for id_ in ends if id_ < self.config.vocab_size)

    def spec(self, kv: CacheFormat = DEFAULT_CACHE) -> ModelGraph:
        """Return the model's shapes for the solver, with caches of that format."""
        graph = model_graph(
            self.config,
            self.weights.weight_format,
            self.name,
            shadows=self.weights.outliers(),
            kv=kv,
        )
        also = self.weights.also
        return graph.model_copy(update={"also": also}) if also else graph


def model_path(model: str | os.PathLike[str]) -> Path:
    """Return the path that a MODEL names.

    For `demo` it is that of the bundled model, for `random:NAME` one that does not exist, whatever
    the current folder holds.
    """
    name = os.fspath(model)
    if name == "demo":
        return DEMO_DIRECTORY
    if name.startswith(RANDOM_PREFIX):
        return DEMO_DIRECTORY / name
    return expand_user(name)


def is_downloaded(model: str) -> bool:
    """Return whether MODEL names one of the hub or of the package index. Raises `ModelError`."""
    return _fetcher(model) is not None


def named_path(model: str) -> Path:
    """Return the path that a MODEL names, which may not exist, downloaded if need be."""
    return _path(model) if is_downloaded(model) else model_path(model)


def _fetcher(model: str) -> Callable[[], Path] | None:
    """Return a function that fetches a model of the hub or of the package index by its name."""
    if (package := package_index.package_name(model)) is not None:
        return partial(package_index.fetch, package)
    named = hub.hub_name(model)
    return None if named is None else partial(hub.fetch, named)


def default_weights(model: str | Path) -> str:
    """Return a MODEL's default format: that of a quantised directory or GGUF file, w4a16 of floats.

    It is gguf-a16 of a directory with experts in MXFP4. Raises `ModelError` for a broken quantised
    directory or file.
    """
    path = named_path(str(model))
    if len(path.name) <= LONGEST_NAME and path.suffix.lower() == ".gguf" and path.is_file():
        from hetero.models.gguf import GgufFile, default_format

        return default_format(GgufFile.opened(path)).value
    if len(path.name) > LONGEST_NAME or not is_quantised(path):
        return (WeightFormat.GGUF_A16 if _has_mxfp4(path) else WeightFormat.W4A16).value
    return read_manifest(path).storage.default_format.value


def open_model(
    model: str | Path, *, weights: str | None = None, verify: bool = False, seed: int = 0
) -> LoadedModel:
    """Open a MODEL. Weights are read (or drawn from `seed`) block by block, on demand.

    `weights` is one of w4a16, w4a8, w8a16, w8a8, f16, f32, gguf-a16, gguf-a8, by default (or by
    `auto`) `default_weights`; w8a8, being calibrated, is of quantised directories and random
    models, gguf-a16 and gguf-a8 are of GGUF files, and of directories with MXFP4. A quantised
    directory serves the formats of its storages, all of them by default; with `verify` its weights
    are hashed, which reads them all. Raises `ModelError`.
    """
    weights = None if weights == AUTO else weights
    weight_format = _weight_format(default_weights(model) if weights is None else weights)
    if str(model).startswith(RANDOM_PREFIX):
        _refuse_of_file(str(model), weight_format)
        return _open_random(str(model), weight_format, seed)
    path = _path(str(model))
    if path.is_file():
        return _open_gguf(path, weight_format)
    if not _has_mxfp4(path):
        _refuse_of_file(str(model), weight_format)
    if is_quantised(path):
        return _open_quantised(path, weight_format, verify=verify, besides=weights is None)
    return _open_checkpoint(path, weight_format)


def model_spec(model: str | Path, weights: str | None = None) -> ModelGraph:
    """Return the shapes of a MODEL, or of a known model by NAME alone, with caches of floats.

    No weight is read. `ModelGraph.with_caches` gives those of another cache format. The weight
    format is w4a16 by default, for a GGUF file its own. Raises `ModelError`.
    """
    if weights is None:
        own = str(model).lower().endswith(".gguf") or is_downloaded(str(model))
        own = own or _has_mxfp4(model_path(model))
        weights = default_weights(model) if own else WeightFormat.W4A16.value
    weight_format = _weight_format(weights)
    from hetero.models import random_models

    name = str(model).removeprefix(RANDOM_PREFIX)
    if name.lower() in random_models.KNOWN_MODELS and not Path(model).is_dir():
        return model_graph(random_models.known_config(name), weight_format, name.lower())
    if str(model).startswith(RANDOM_PREFIX):
        return model_graph(random_models.known_config(name), weight_format, name.lower())
    path = _path(str(model), shapes=True)
    config = gguf_config(path) if path.is_file() else ModelConfig.from_directory(path)
    if ARCHITECTURES[config.architecture].mtp:
        _announce_head(path, config)
    return model_graph(config, weight_format, path.name)


def _announce_head(path: Path, config: ModelConfig) -> None:
    """Give the notice of a head for multi-token prediction, if weights are there to have one."""
    if path.is_file():
        _open_gguf(path, WeightFormat.F32)
    elif has_weights(path):
        CheckpointWeights(path, config, WeightFormat.F32)


def _weight_format(weights: str) -> WeightFormat:
    try:
        return WeightFormat(weights)
    except ValueError:
        raise ModelError(
            f"weights {weights!r} is not a format; choose one of: {', '.join(WeightFormat)}"
        ) from None


def _open_random(model: str, weight_format: WeightFormat, seed: int) -> LoadedModel:
    from hetero.models import random_models  # makes all known configurations

    name = model.removeprefix(RANDOM_PREFIX).lower()
    config = random_models.limited(random_models.known_config(name))
    identity = f"{name}|{random_models.GENERATOR_VERSION}|{seed}|{weight_format.storage}|{config}"
    return LoadedModel(
        name=RANDOM_PREFIX + name,
        config=config,
        weights=random_models.RandomWeights(config, weight_format, seed),
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
    )


def _has_mxfp4(path: Path) -> bool:
    return len(path.name) <= LONGEST_NAME and has_mxfp4(path)


def _refuse_of_file(model: str, weight_format: WeightFormat) -> None:
    if weight_format.of_file:
        raise ModelError(
            f"{model}: {weight_format} is what a GGUF file stores; give a .gguf file, or choose "
            "--weights w4a16"
        )


def _refuse_uncalibrated(path: Path, weight_format: WeightFormat) -> None:
    if weight_format.activations.static:
        raise ModelError(
            f"{path}: {weight_format} needs scales of activations, which come from a text like "
            f"those that the model is for; run hetero quantize {path} --weights {weight_format} "
            "--calibrate TEXT --out DIR, and open DIR"
        )


def _open_checkpoint(path: Path, weight_format: WeightFormat) -> LoadedModel:
    _refuse_uncalibrated(path, weight_format)
    config = ModelConfig.from_directory(path)
    weights = CheckpointWeights(path, config, weight_format)
    identity = f"{weight_format.storage}|{config}|{weights.files.fingerprint()}"
    return LoadedModel(
        name=path.resolve().name,
        config=config,
        weights=weights,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        source=path,
    )


def _open_gguf(path: Path, weight_format: WeightFormat) -> LoadedModel:
    from hetero.models.gguf import open_weights  # the library behind it is heavy

    _refuse_uncalibrated(path, weight_format)
    weights = open_weights(path, weight_format)
    identity = f"{weight_format.storage}|{weights.config}|{weights.file.fingerprint()}"
    return LoadedModel(
        name=Path(model_name(path.name)).stem,
        config=weights.config,
        weights=weights,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
        source=weights.source,
    )


def gguf_tokenizer(path: Path) -> HfTokenizer:
    """Return the tokenizer of a GGUF file. Raises `ModelError`."""
    from hetero.models.gguf import GgufFile, read_tokenizer

    return read_tokenizer(GgufFile.opened(path))


def gguf_config(path: Path) -> ModelConfig:
    """Return the configuration of a GGUF file. Raises `ModelError`."""
    from hetero.models.gguf import GgufFile, read_config

    return read_config(GgufFile.opened(path))


def _open_quantised(
    path: Path, weight_format: WeightFormat, *, verify: bool, besides: bool
) -> LoadedModel:
    if path == DEMO_DIRECTORY:
        return _open_demo(path, weight_format, verify)
    manifest, weights = quantized.open_directory(
        path, weight_format, verify=verify, besides=besides
    )
    identity = (path / MANIFEST_FILE).read_bytes()
    if weights.weight_format.storage is not manifest.storage:
        identity += weights.weight_format.storage.encode()
    return _quantised_model(path, manifest, weights, identity)


def _open_demo(path: Path, weight_format: WeightFormat, verify: bool) -> LoadedModel:
    """Open the bundled model in any format: there is no original to quantise again."""
    _refuse_uncalibrated(path, weight_format)
    manifest, stored = quantized.open_directory(path, verify=verify)
    weights: ModelWeights = stored
    identity = (path / MANIFEST_FILE).read_bytes()
    if weight_format.storage is not manifest.storage:
        weights = ConvertedWeights(stored, weight_format)
        identity += weight_format.storage.encode()
    else:
        stored.weight_format = weight_format
    return _quantised_model(path, manifest, weights, identity)


def _quantised_model(
    path: Path, manifest: Manifest, weights: ModelWeights, identity: bytes
) -> LoadedModel:
    return LoadedModel(
        name=manifest.name,
        config=weights.config,
        weights=weights,
        fingerprint=hashlib.sha256(identity).hexdigest(),
        source=path,
        byte_tokenizer=manifest.tokenizer == "bytes",
    )


def _path(model: str, *, shapes: bool = False) -> Path:
    """Return the directory or GGUF file of a MODEL that is not random.

    Where only its `shapes` matter, the error says that a known name would do.
    """
    try:
        return _resolved_path(model, shapes)
    except OSError as error:
        raise ModelError(
            f"{model}: cannot be looked at ({error.strerror}); let this user read the folder"
        ) from error


def _resolved_path(model: str, shapes: bool) -> Path:
    path = model_path(model)
    if len(path.name) > LONGEST_NAME:
        raise ModelError(
            f"{model!r}: a file's name has at most {LONGEST_NAME} characters; MODEL is a Hugging "
            "Face directory, a .gguf file, demo, or random:NAME"
        )
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path
    if path.is_dir() and model:
        if not (path / "config.json").is_file():
            raise ModelError(f"{model}: has no config.json; give a Hugging Face model directory")
        return path
    if model == "demo":
        raise ModelError(f"demo: {path} is missing from this installation; install hetero again")
    if path.exists() and model:
        raise ModelError(f"{model}: is a file; give the model's directory, or a .gguf file")
    if (fetch := _fetcher(model)) is not None:
        return fetch()
    from hetero.models import random_models

    kind = "file" if path.suffix.lower() == ".gguf" else "directory"
    last = f"one of {', '.join(random_models.KNOWN_MODELS)}" if shapes else "random:NAME"
    raise ModelError(
        f"{model!r}: there is no such {kind}; {_hint(model, shapes)}MODEL is a Hugging Face "
        f"directory, a .gguf file, OWNER/NAME of the hub, pypi:PACKAGE, demo, or {last}"
    )


def _hint(model: str, shapes: bool) -> str:
    """Return what the user may have meant.

    Random weights are never suggested in place of real ones: where a known model is named, the hint
    says that they are random.
    """
    from hetero.models import random_models

    if near := _nearest(model):
        return f"did you mean {near!r}? "
    known = difflib.get_close_matches(model.lower(), random_models.KNOWN_MODELS, n=1, cutoff=0.8)
    if known and shapes:
        return f"did you mean {known[0]!r}? "
    if known:
        return (
            f"for benchmarks there is {RANDOM_PREFIX + known[0]!r}, the shapes of that "
            "model with random weights; "
        )
    return ""


def _nearest(model: str) -> str | None:
    """Return what the user may have meant: a directory or file nearby, demo, or `random:NAME`."""
    path = Path(model)
    try:
        siblings = [
            x.name
            for x in expand_user(path).parent.iterdir()
            if x.is_dir() or x.suffix.lower() == ".gguf"
        ]
    except OSError:
        siblings = []
    if near := difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.6):
        return str(path.parent / near[0])
    if close := difflib.get_close_matches(model.lower(), ("demo",), n=1, cutoff=0.6):
        return close[0]
    if not model.lower().startswith("rand"):
        return None
    from hetero.models import random_models

    known = [RANDOM_PREFIX + name for name in random_models.KNOWN_MODELS]
    return next(iter(difflib.get_close_matches(model.lower(), known, n=1, cutoff=0.6)), None)
