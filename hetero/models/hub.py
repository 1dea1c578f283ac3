"""Models by their names on the Hugging Face hub: `hf:owner/name[:file]` or `owner/name`.

The short form is one where no folder `owner` is here.

Files go through `huggingface_hub` into the user's own cache, which other programs share; progress,
resuming and the endpoint (`HF_ENDPOINT`) are that library's. A complete model in the cache is used
without asking the network. The hash of every large file is checked once, after its download: its
name in the cache is the hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from hetero.backends.host.extras import is_here
from hetero.backends.host.files import atomic_write
from hetero.errors import ModelError
from hetero.models.package_index import kept_models
from hetero.models.split_files import split_names

PREFIX: Final = "hf:"
_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PARTS: Final = (
    "config.json", "generation_config.json", "hetero.json", "tokenizer*", "chat_template*",
    "special_tokens_map.json", "*.safetensors", "*.safetensors.index.json",
)  # fmt: skip
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class HubName(NamedTuple):
    """A hub name `owner/name`, perhaps with one of its files."""

    repo: str
    file: str = ""

    @property
    def command(self) -> str:
        """Return the command that downloads it."""
        return f"hf download {self.repo}{' ' + self.file if self.file else ''}"


def hub_name(model: str) -> HubName | None:
    """Return the hub name that MODEL is, if it is one. Raises `ModelError` for a broken `hf:`."""
    if model.startswith(PREFIX):
        repo, _, file = model.removeprefix(PREFIX).partition(":")
        if not _ID.fullmatch(repo) or ".." in Path(file).parts or Path(file).is_absolute():
            raise ModelError(f"{model!r}: a model of the hub is named hf:OWNER/NAME or …:FILE")
        return HubName(repo, file)
    if _ID.fullmatch(model) and not model.endswith(".gguf"):
        owner = model.partition("/")[0]
        return None if any(map(os.path.exists, (owner, model))) else HubName(model)
    return None


def fetch(name: HubName) -> Path:
    """Return the directory or GGUF file of a model, downloaded unless the cache has all of it.

    Raises `ModelError`.
    """
    if not is_here("huggingface_hub"):
        raise ModelError(
            f"{name.repo} is a name on the Hugging Face hub, for which huggingface_hub is missing: "
            "pip install 'hetero[hub]', or download the model and name its directory"
        )
    if (cached := _in_cache(name)) is not None:
        return cached
    with _sentences(name):
        return _download(name)


def _in_cache(name: HubName) -> Path | None:
    """Return the path of the model in the cache, if all of it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name.repo, local_files_only=True))
    except (LocalEntryNotFoundError, FileNotFoundError):
        return None
    if name.file:
        whole = all((folder / file).is_file() for file in split_names(name.file))
        return folder / name.file if whole else None
    if is_whole(folder):
        return folder
    models = gguf_models(sorted(folder.rglob("*.gguf")))
    return models[0][0] if len(models) == 1 and not (folder / "config.json").is_file() else None


def gguf_models(files: Sequence[Path]) -> list[tuple[Path, int]]:
    """Return the models among GGUF files, each by its first file, and their bytes.

    Split models with missing files are left out.
    """
    there = {str(file): file for file in files}
    groups = {tuple(split_names(name)) for name in there}
    return sorted(
        (there[names[0]], sum(there[name].stat().st_size for name in names))
        for names in groups
        if there.keys() >= set(names)
    )


def is_whole(folder: Path) -> bool:
    """Return whether a folder has a configuration and all weights that its index names."""
    if not os.path.isfile(folder / "config.json"):  # false where it cannot be looked for
        return False
    index = folder / "model.safetensors.index.json"
    if not os.path.isfile(index):
        return any(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / str(name)).is_file() for name in names)


def _download(name: HubName) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    endpoint = os.environ.get("HF_ENDPOINT")
    info = HfApi(endpoint=endpoint).model_info(name.repo, files_metadata=True)
    sizes = {x.rfilename: x.size or 0 for x in info.siblings or ()}
    common: dict[str, Any] = {"endpoint": endpoint, "revision": info.sha}
    if name.file or not {"config.json"} <= set(sizes):
        file = name.file or _only_gguf(name, sizes)
        parts = split_names(file)
        absent = next((part for part in parts if part not in sizes), None)
        if absent is not None:
            raise ModelError(f"{name.repo} has no file {absent}; it has {_some(sizes)}")
        _say(name, sum(sizes[part] for part in parts))
        paths = {part: Path(hf_hub_download(name.repo, part, **common)) for part in parts}
        for path in paths.values():
            _check(path)
        _point_main(paths[file], file, str(info.sha))
        return paths[file]
    wanted = sum(size for file, size in sizes.items() if any(map(Path(file).match, PARTS)))
    _say(name, wanted)
    folder = Path(snapshot_download(name.repo, allow_patterns=list(PARTS), **common))
    if not is_whole(folder):
        raise ModelError(
            f"{name.repo} has no weights as safetensors; it has {_some(sizes)}: choose a model "
            "that has, or a GGUF file as hf:OWNER/NAME:FILE"
        )
    for path in folder.rglob("*"):
        _check(path)
    _point_main(folder / "config.json", "config.json", str(info.sha))
    return folder


def _point_main(path: Path, file: str, revision: str) -> None:
    """Point the cache's branch `main` to this revision, as a download by the branch's name does.

    The model is then found again without the network.
    """
    snapshots = path.parents[len(Path(file).parts)]
    if snapshots.name == "snapshots":
        reference = snapshots.parent / "refs" / "main"
        reference.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(reference, revision)


def _only_gguf(name: HubName, sizes: dict[str, int]) -> str:
    files = sorted({split_names(x)[0] for x in sizes if x.lower().endswith(".gguf")})
    if len(files) == 1:
        return files[0]
    if not files:
        raise ModelError(f"{name.repo} has neither config.json nor a GGUF file: {_some(sizes)}")
    raise ModelError(
        f"{name.repo} has several models: name one, as hf:{name.repo}:{files[0]} ({_some(files)})"
    )


def _some(names: Any) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _say(name: HubName, nbytes: int) -> None:
    print(f"hetero: downloading {name.repo}, {nbytes / 1e9:.2f} GB", file=sys.stderr)


def _check(path: Path) -> None:
    """Raise `ModelError`, and remove the file, if a file of the cache does not match its name."""
    blob = path.resolve()
    if not path.is_file() or not _SHA256.fullmatch(blob.name):
        return
    with blob.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != blob.name:
        blob.unlink()
        path.unlink(missing_ok=True)
        raise ModelError(
            f"{path.name} arrived damaged (its hash is {digest[:12]}…): run the command again"
        )


@contextmanager
def _sentences(name: HubName) -> Iterator[None]:
    """Raise the hub's errors, and those of a missing network, as `ModelError`."""
    from huggingface_hub import errors

    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name.repo} is given to those only who agreed to its licence: do so on its page, "
            "then `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{name.repo!r}: there is no such directory, and no such model on the hub"
        ) from error
    except Exception as error:  # of an HTTP library that is another in each version
        raise ModelError(
            f"{name.repo!r}: there is no such directory, it is not in the hub's cache, and the hub "
            f"cannot be reached ({type(error).__name__}): where it can, run `{name.command}`"
        ) from error


class Here(NamedTuple):
    """A model that can be opened without a network."""

    name: str
    format: str
    nbytes: int
    where: str


def models_here(folder: Path | None, demo: Path) -> list[Here]:
    """Return the demo, the models in a folder, and those that were downloaded before.

    Raises `OSError` for a folder that cannot be listed.
    """
    models = [Here("demo", "hetero", _bytes(demo), str(demo))]
    paths = [] if folder is None else sorted(folder.iterdir())
    forms = {path: form for path in paths if (form := _format(path)) is not None}
    sizes = dict(gguf_models([path for path, form in forms.items() if form == "GGUF"]))
    models.extend(
        Here(f"./{path.name}", form, sizes[path] if form == "GGUF" else _bytes(path), str(path))
        for path, form in forms.items()
        if form != "GGUF" or path in sizes
    )
    packaged = [Here(name, "GGUF", _bytes(path), str(path)) for name, path in kept_models()]
    return models + packaged + list(_cached())


def _cached() -> Iterator[Here]:
    if not is_here("huggingface_hub"):
        return
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, OSError, RuntimeError):  # no home folder
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        for revision in repo.revisions:
            folder = revision.snapshot_path
            if repo.repo_type == "model" and "main" in revision.refs and is_whole(folder):
                size = revision.size_on_disk
                yield Here(repo.repo_id, _format(folder) or "safetensors", size, str(folder))
            elif repo.repo_type == "model" and "main" in revision.refs:
                for file, nbytes in gguf_models(list(folder.rglob("*.gguf"))):
                    named = f"{PREFIX}{repo.repo_id}:{file.relative_to(folder)}"
                    yield Here(named, "GGUF", nbytes, str(file))


def _format(path: Path) -> str | None:
    if os.path.isfile(path):
        return "GGUF" if path.suffix.lower() == ".gguf" else None
    if os.path.isfile(path / "hetero.json"):
        return "hetero"
    return "safetensors" if is_whole(path) else None


def _bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if os.path.isfile(file))
