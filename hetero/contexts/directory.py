"""The folder of a service: whose it is, which model it is of, and a folder for each app.

    service.json       identity of the model, what was measured of it, a secret
    lock               held by the one process that uses the folder
    apps/NAME          one app: NAME is a keyed hash of the app's name
        ctx-ID.log     the text of a context
        00000000.kv    chunks

Folders are for their owner alone. Keys and values tell the text; they are not encrypted.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from filelock import FileLock, Timeout

from hetero.backends.host.files import LONGEST_DOCUMENT_BYTES, atomic_write, read_text
from hetero.contexts.codec import CODEC_VERSION
from hetero.contexts.kv_cache import CacheLayout
from hetero.contexts.session_file import Identity
from hetero.errors import UserError

VERSION: Final = 1
T = TypeVar("T")


class ServiceDirectory:
    """An open folder, locked. Raises `UserError` if it is another model's, in use, or unusable."""

    def __init__(self, path: Path, identity: Identity, layout: CacheLayout) -> None:
        self.path, self._kv = path, layout.kv.value
        try:
            (path / "apps").mkdir(parents=True, exist_ok=True, mode=0o700)
            path.chmod(0o700)
            self._lock = FileLock(path / "lock", timeout=0)
            self._lock.acquire()
        except Timeout:
            raise UserError(
                f"{path}: another process uses these contexts: end it, or choose another directory"
            ) from None
        except OSError as error:
            raise UserError(
                f"{path}: contexts cannot be kept here ({error.strerror or error}): choose another "
                "directory"
            ) from error
        try:
            self.about = self._opened(_described(identity, layout))
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Let others use it; idempotent."""
        self._lock.release()

    def save(self, **facts: Any) -> None:
        """Keep facts beside the identity."""
        self.about |= facts
        try:
            atomic_write(self.path / "service.json", json.dumps(self.about))
        except OSError as error:
            raise UserError(
                f"{self.path}: contexts cannot be kept here ({error.strerror or error}): choose "
                "another directory"
            ) from error

    def read(self, what: Callable[[dict[str, Any]], T]) -> T:
        """Something of the facts that are kept. Raises `UserError` where it is none."""
        try:
            return what(self.about)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(
                f"{self.path / 'service.json'}: is damaged ({error!r}): restore it, or choose "
                "another directory"
            ) from error

    def app(self, name: str) -> Path:
        """An app's folder, made if there is none."""
        folder = self.path / "apps" / self._keyed(b"name", name).hex()[:32]
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def root(self, name: str) -> bytes:
        """What the keys of an app's chunks begin with: nobody else's do."""
        described = json.dumps(self.about["identity"], sort_keys=True)
        facts = described + json.dumps(self.about.get("channels")) + self._kv
        return hashlib.blake2b(facts.encode(), key=self._keyed(b"root", name)).digest()[:32]

    def _keyed(self, use: bytes, name: str) -> bytes:
        key = bytes.fromhex(self.about["secret"])
        return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), key=key, person=use).digest()

    def _opened(self, described: dict[str, Any]) -> dict[str, Any]:
        path = self.path / "service.json"
        if not path.exists():
            about = {
                "version": VERSION,
                "identity": described,
                "secret": secrets.token_bytes(32).hex(),
            }
            atomic_write(path, json.dumps(about))
            os.chmod(path, 0o600)
            return about
        try:
            found = json.loads(read_text(path, LONGEST_DOCUMENT_BYTES))
            same, secret = found["identity"] == described, bytes.fromhex(found["secret"])
            whole = found["version"] == VERSION and len(secret) == 32
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path}: is damaged ({error}): restore it, or choose another directory"
            ) from error
        if not whole:
            raise UserError(
                f"{path}: was written by another version of hetero: choose another directory"
            )
        if not same:
            raise UserError(
                f"{self.path}: these contexts belong to another model or weight format: open them "
                "with that, or choose another directory"
            )
        return dict(found)


def _described(identity: Identity, layout: CacheLayout) -> dict[str, Any]:
    """Everything that keys and values of equal texts depend on."""
    return identity.metadata | {
        "codec": CODEC_VERSION,
        "cache": [layout.layers, layout.kv_heads, layout.head_dim, *[layout.kv] * layout.kv.coded],
    }
