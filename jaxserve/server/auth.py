"""API keys: who is asking, and whose prefix cache that may touch.

Only digests of keys stay in memory. A presented key's digest is compared with every accepted one in
constant time, so neither the time nor the answer tells how close a guess was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import pathlib
import re
import secrets

from jaxserve.server.errors import ApiError

# Probes carry no data and must work for orchestrators that have no key. The page is a static file
# that asks for the key itself. Everything else is guarded.
OPEN_PATHS = frozenset(["/live", "/ready", "/health", "/", "/dashboard"])
MAX_KEY_CHARS = 512
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who sent a request. tenant: "" without keys, else a short digest of the key."""

    tenant: str = ""


@dataclasses.dataclass(frozen=True)
class KeyRing:
    """The accepted keys by digest. Empty: the server is open to whoever reaches its port."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def load(cls, path: str | None) -> KeyRing:
        """Keys from a file, one a line, plain or as sha256:HEX; blank lines and # are skipped."""
        if path is None:
            return cls()
        lines = [line.strip() for line in pathlib.Path(path).read_text("utf-8").splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"--api_keys_file={path} has no keys; write one a line")
        return cls(tuple(_digest_of_line(key) for key in keys))

    def find(self, key: str) -> Caller | None:
        """The caller with this key, or None. Looks at every digest, found or not."""
        presented = hashlib.sha256(key.encode()).digest()
        found = None
        for digest in self.digests:
            if hmac.compare_digest(digest, presented):
                found = digest
        return None if found is None else Caller(found.hex()[:16])


def _digest_of_line(line: str) -> bytes:
    match = _HASHED.fullmatch(line)
    return bytes.fromhex(match[1]) if match else hashlib.sha256(line.encode()).digest()


class CacheSalts:
    """Names for prefix-cache neighbourhoods: one a tenant, or one a (tenant, cache_salt).

    Keyed by a secret of this process, so a salt cannot be aimed at another tenant's pages.
    """

    def __init__(self):
        self._secret = secrets.token_bytes(32)

    def salt(self, tenant: str, asked: str | None) -> str:
        """The engine's cache_salt; "" (shared by all) only without keys and without a salt."""
        if not tenant and asked is None:
            return ""
        name = f"{tenant}\0{asked or ''}".encode()
        return hmac.new(self._secret, name, hashlib.sha256).hexdigest()[:32]


class Auth:
    """ASGI layer that lets only holders of a key past; the scope's state gets the Caller."""

    def __init__(self, app, keys: KeyRing):
        self.app = app
        self.keys = keys

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        caller = Caller() if not self.keys.digests else self._caller(scope)
        if caller is None:
            message = "Missing or wrong API key; send it as 'Authorization: Bearer KEY'."
            response = ApiError(401, message, "invalid_api_key").response(scope["path"])
            response.headers["WWW-Authenticate"] = "Bearer"
            return await response(scope, receive, send)
        scope.setdefault("state", {})["caller"] = caller
        await self.app(scope, receive, send)

    def _caller(self, scope) -> Caller | None:
        if scope["path"] in OPEN_PATHS or scope["path"].startswith("/static/"):
            return Caller()
        key = _presented_key(scope["headers"])
        return None if key is None else self.keys.find(key)


def _presented_key(headers) -> str | None:
    """From "Authorization: Bearer KEY" (OpenAI) or "x-api-key: KEY" (Anthropic)."""
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"x-api-key" and len(text) <= MAX_KEY_CHARS:
            return text
        if name == b"authorization" and len(text) <= MAX_KEY_CHARS + 7:
            scheme, _, key = text.partition(" ")
            if scheme.lower() == "bearer":
                return key.strip()
    return None
