"""The key of a job, with which its ranks sign their messages to each other (docs/adr/030).

The launcher makes the key and hands it to the ranks in the environment.
"""

import hmac
import os
import zlib

from whale_train.errors import LaunchError

KEY = "WHALE_TRAIN_JOB_KEY"  # the variable of the job's key, 64 hexadecimal digits
_KEY_BYTES = _TAG_BYTES = 32  # of SHA-256


class JobKey:
    """The key of a job, and the names and signatures that are derived from it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def from_environment(cls) -> "JobKey":
        """Return the key that the launcher put into the environment.

        Raises LaunchError unless the variable is set and has 64 hexadecimal digits.
        """
        text = os.environ.get(KEY, "")
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) != _KEY_BYTES:
            raise LaunchError(f"{KEY} is not a key: start ranks by whale-train")
        return cls(key)

    @property
    def nonce(self) -> str:
        """Return the prefix of all names of this job in the store, so that no other job's names are
        read."""
        return self._of(b"names in the store")

    @property
    def fingerprint(self) -> str:
        """Return a text that tells this key from others without disclosing the key."""
        return self._of(b"fingerprint")

    def signed(self, text: str) -> bytes:
        """Return a signed message that carries `text`: a tag of 32 bytes, then the compressed
        text."""
        # A store takes 8 MB at once (torch's TCPStoreLibUvBackend), and a large plan has more.
        packed = zlib.compress(text.encode())
        return self._tag(packed) + packed

    def checked(self, message: bytes, sender: str) -> str:
        """Return the text of a `message` that `signed` made. `sender` names the message's origin in
        errors.

        Raises LaunchError for a message without this key's tag; such a message is not decompressed.
        """
        tag, packed = message[:_TAG_BYTES], message[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(packed)):
            rule = f"the message of {sender} was not signed by a rank of this job"
            raise LaunchError(f"{rule}, and is not believed")
        return zlib.decompress(packed).decode()

    def _tag(self, packed: bytes) -> bytes:
        return hmac.digest(self._key, b"message " + packed, "sha256")

    def _of(self, purpose: bytes) -> str:
        """Return the key's digest for one `purpose`, in hexadecimal digits."""
        return hmac.digest(self._key, purpose, "sha256").hex()
