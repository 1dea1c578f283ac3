"""The folder of a service: its lock, its model's identity, and a folder for each app.

    service.json       identity of the model, measurements of it, a secret
    lock               locked by the one process that uses the folder
    apps/NAME          one app: NAME is a keyed hash of the app's name
        ctx-ID.log     the text of a context
        00000000.kv    chunks

Only the owner can read the folders. Keys and values reveal the text: with an encryption key
(`encryption.py`) they are encrypted like the text, and so is the secret from which apps' folder
names and chunks' keys are derived.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from filelock import FileLock, Timeout

from hetero.backends.host.files import LONGEST_DOCUMENT_BYTES, atomic_write, read_text
from hetero.contexts.codec import CODEC_VERSION, FIRST_VERSIONS
from hetero.contexts.encryption import SealError, Vault, check_key
from hetero.errors import UserError
from hetero.runtime.kv.kv_cache import CacheLayout
from hetero.runtime.kv.session_file import Identity

VERSION: Final = 1
T = TypeVar("T")


class ServiceDirectory:
    """An open folder, locked.

    Raises `UserError` if it is of another model, encrypted with another key than `vault`'s, in use,
    or unusable.
    """

    def __init__(
        self, path: Path, identity: Identity, layout: CacheLayout, vault: Vault | None = None
    ) -> None:
        self.path, self._kv, self._vault = path, layout.kv.value, vault
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
                f"{path}: contexts cannot be stored here ({error.strerror or error}): choose "
                "another directory"
            ) from error
        try:
            versions = CODEC_VERSION, FIRST_VERSIONS[not layout.alike]
            self.about = self._opened([_described(identity, layout, x) for x in versions])
            self.codec = int(self.about["identity"]["codec"])
            self._secret = self._unsealed(bytes.fromhex(self.about["secret"]))
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Unlock the folder for other processes; idempotent."""
        self._lock.release()

    def save(self, **facts: Any) -> None:
        """Save facts with the identity."""
        self.about |= facts
        try:
            atomic_write(self.path / "service.json", json.dumps(self.about))
        except OSError as error:
            raise UserError(
                f"{self.path}: contexts cannot be stored here ({error.strerror or error}): choose "
                "another directory"
            ) from error

    def read(self, what: Callable[[dict[str, Any]], T]) -> T:
        """Return a value parsed from the saved facts. Raises `UserError` where they are damaged."""
        try:
            return what(self.about)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(
                f"{self.path / 'service.json'}: is damaged ({error!r}): restore it, or choose "
                "another directory"
            ) from error

    def app(self, name: str) -> Path:
        """Return an app's folder, created if needed."""
        folder = self.path / "apps" / self._keyed(b"name", name).hex()[:32]
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def root(self, name: str) -> bytes:
        """Return the prefix of the keys of an app's chunks, unlike any other app's."""
        described = json.dumps(self.about["identity"], sort_keys=True)
        facts = described + json.dumps(self.about.get("channels")) + self._kv
        return hashlib.blake2b(facts.encode(), key=self._keyed(b"root", name)).digest()[:32]

    def _keyed(self, use: bytes, name: str) -> bytes:
        data = name.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self._secret, person=use).digest()

    def _unsealed(self, secret: bytes) -> bytes:
        if self._vault is None:
            return secret
        try:
            return self._vault.box("secret", b"").open(secret, b"secret")
        except SealError as error:
            path = self.path / "service.json"
            raise UserError(
                f"{path}: is damaged ({error}): restore it, or choose another directory"
            ) from error

    def _made(self) -> bytes:
        """Return a new secret as it is stored."""
        secret = secrets.token_bytes(32)
        if self._vault is None:
            return secret
        return self._vault.box("secret", b"").seal(secret, b"secret")

    def _opened(self, known: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the facts of a folder of one of these identities; a new one has the first."""
        path = self.path / "service.json"
        if not path.exists():
            about = {
                "version": VERSION,
                "identity": known[0],
                "secret": self._made().hex(),
            }
            if self._vault is not None:
                about["encryption"] = self._vault.key_id
            atomic_write(path, json.dumps(about))
            os.chmod(path, 0o600)
            return about
        try:
            document = json.loads(read_text(path, LONGEST_DOCUMENT_BYTES))
            same, secret = document["identity"] in known, bytes.fromhex(document["secret"])
            sealed = document.get("encryption", "")
            wanted = len(secret) > 32 if sealed else len(secret) == 32
            whole = document["version"] == VERSION and wanted and isinstance(sealed, str)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path}: is damaged ({error}): restore it, or choose another directory"
            ) from error
        if not whole:
            raise UserError(
                f"{path}: was written by another version of hetero: choose another directory"
            )
        check_key(self.path, sealed, self._vault)
        if not same:
            raise UserError(
                f"{self.path}: these contexts belong to another model or weight format: open them "
                "with that, or choose another directory"
            )
        return dict(document)


def _described(identity: Identity, layout: CacheLayout, codec: int) -> dict[str, Any]:
    """Return everything that the keys and values of equal texts depend on."""
    own = [x for heads in layout.heads_of for x in heads]
    heads = own or [layout.kv_heads, layout.head_dim]
    return identity.metadata | {
        "codec": codec,
        "cache": [layout.layers, *heads, *[layout.kv] * layout.kv.coded],
    }
