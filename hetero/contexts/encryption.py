"""Encryption at rest: AES-256-GCM by `cryptography`, of everything that reveals a text.

The key has 32 bytes and belongs to the user of the process: it is in a file that no one else can
read, or in the environment (`HETERO_ENCRYPTION_KEY`). It encrypts nothing itself: each file has a
random salt, from which its own key is derived (HKDF-SHA-256), so nonces never collide. Data is
sealed for its place (`about`): data moved elsewhere does not open. Folders record which key
encrypts them as a hash that reveals nothing of it.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Final

from hetero.errors import UserError

VARIABLE: Final = "HETERO_ENCRYPTION_KEY"
KEY_BYTES: Final = 32
SALT_BYTES: Final = 32
TAG_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_LONGEST_FILE: Final = 4096


class SealError(Exception):
    """Data that was not sealed by this key for this place, or was changed since."""


class Vault:
    """A key, from which those of files are derived.

    Raises `UserError` where `cryptography` is not installed.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise UserError(f"an encryption key has {KEY_BYTES} bytes, got {len(key)}: make one")
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError:
            raise UserError(
                "encryption needs another package: pip install 'hetero[encryption]'"
            ) from None
        self._key, self._aead, self._hkdf, self._hash = key, AESGCM, HKDF, SHA256
        self.key_id = hashlib.blake2b(key=key, person=b"hetero key id", digest_size=8).hexdigest()

    def box(self, use: str, salt: bytes) -> Box:
        """Return the cipher of one file, which has a salt of its own."""
        info = f"hetero {use}".encode()
        made = self._hkdf(algorithm=self._hash(), length=KEY_BYTES, salt=salt, info=info)
        key = made.derive(self._key)
        return Box(self._aead(key), hashlib.blake2b(key, person=b"hetero names").digest())


class Box:
    """Seal and open data with one key."""

    def __init__(self, aead: Any, names: bytes) -> None:
        self._aead, self._names = aead, names

    def seal(self, data: bytes, about: bytes) -> bytes:
        """Return the sealed data after a random nonce."""
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + bytes(self._aead.encrypt(nonce, data, about))

    def open(self, data: bytes | memoryview, about: bytes) -> bytes:
        """Return the plaintext. Raises `SealError`."""
        return self._opened(bytes(data[:_NONCE_BYTES]), data[_NONCE_BYTES:], about)

    def seal_nth(self, nth: int, data: bytes, about: bytes) -> bytes:
        """Return the sealed nth item of a file written once, `TAG_BYTES` longer than it was."""
        return bytes(self._aead.encrypt(nth.to_bytes(_NONCE_BYTES, "little"), data, about))

    def open_nth(self, nth: int, data: bytes | memoryview, about: bytes) -> bytes:
        """Return the plaintext. Raises `SealError`."""
        return self._opened(nth.to_bytes(_NONCE_BYTES, "little"), data, about)

    def digest(self, name: bytes) -> str:
        """Return the keyed hash of a name, which can be looked up and reveals nothing."""
        return hashlib.blake2b(name, key=self._names, digest_size=32).hexdigest()

    def _opened(self, nonce: bytes, data: bytes | memoryview, about: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._aead.decrypt(nonce, data, about))
        except (InvalidTag, ValueError) as error:
            raise SealError("sealed by another key, for another place, or damaged") from error


def vault_of(key: str | os.PathLike[str] | bytes | None) -> Vault | None:
    """Return the vault of a key, of a key file, or of the environment's key; None without any.

    A file holds 32 bytes, or 64 hexadecimal digits. Raises `UserError` for what is no key, or not
    secret.
    """
    if isinstance(key, bytes):
        return Vault(key)
    if key is not None:
        return Vault(_of_file(Path(key)))
    text = os.environ.get(VARIABLE, "")
    return Vault(_of_text(text.encode(), f"the environment's {VARIABLE}")) if text else None


def _of_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            # A credential of systemd's is for its service by an ACL, which shows as the group's.
            given = os.environ.get("CREDENTIALS_DIRECTORY")
            others = 0o007 if given and path.parent == Path(given) else 0o077
            if os.name == "posix" and os.fstat(file.fileno()).st_mode & others:
                raise UserError(f"{path}: others can read the encryption key: chmod 600 it")
            data = file.read(_LONGEST_FILE)
    except OSError as error:
        raise UserError(
            f"{path}: the encryption key cannot be read ({error.strerror or error}); check the path"
        ) from error
    return data if len(data) == KEY_BYTES else _of_text(data, str(path))


def _of_text(data: bytes, where: str) -> bytes:
    digits = data.strip()
    if not re.fullmatch(b"[0-9a-fA-F]{%d}" % (2 * KEY_BYTES), digits):
        raise UserError(
            f"{where}: an encryption key is {KEY_BYTES} bytes, or {2 * KEY_BYTES} hexadecimal "
            "digits: make one with `openssl rand -hex 32`"
        )
    return bytes.fromhex(digits.decode())


def check_key(where: Path, stored_id: str, vault: Vault | None) -> None:
    """Raise `UserError` unless `vault` is right for data encrypted with the key `stored_id`.

    An empty id means that the data is not encrypted.
    """
    if stored_id and vault is None:
        raise UserError(
            f"{where}: is encrypted: give the key (encryption_key, --encryption-key FILE or "
            f"{VARIABLE})"
        )
    if not stored_id and vault is not None:
        raise UserError(
            f"{where}: is not encrypted: open it without a key, or choose another directory"
        )
    if vault is not None and stored_id != vault.key_id:
        raise UserError(
            f"{where}: is encrypted by another key ({stored_id}, this one is {vault.key_id}): give "
            "that one, or choose another directory"
        )
