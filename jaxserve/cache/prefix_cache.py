"""PrefixCache: finds the pages that already hold the KV of a prompt's beginning.

The KV of a token depends on all tokens before it, so a page is named by a digest chained over
them: digest(page i) = H(digest(page i-1), tokens of page i), beginning with the digest of the
request's cache salt. H is blake2b, and the first digest of a chain is keyed with a secret of the
process, so nobody outside can know any digest, let alone construct two prompts that share one:
equal digests mean equal tokens and equal salt.

Only full pages whose KV a finished step has written are published. Nobody writes to such a page
again while it is published: its owner continues in the next page, and a sequence that hits it
recomputes at least its last token, which lies in a page of its own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as SequenceOf

from jaxserve.cache.page_pool import PagePool

DIGEST_BYTES = 16


class PrefixCache:
    """Digest -> page, over a PagePool that keeps published pages as idle ones, evicted LRU."""

    def __init__(self, pool: PagePool, page_size: int, key: bytes):
        """key: up to 64 secret bytes, drawn anew by each process; they arrive from outside because
        nothing in the scheduler is random."""
        self._pool = pool
        self._page_size = page_size
        self._key = key
        self._pack = struct.Struct(f"{page_size}i").pack
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._page_of)

    def extend(
        self, chain: list[bytes], tokens: SequenceOf[int], salt: str, num_pages: int
    ) -> None:
        """Grows `chain` in place to the digests of the first num_pages full pages of tokens.

        chain[0] is the salt's digest and chain[i + 1] that of page i; an empty list is a new chain.
        """
        if not chain:
            root = hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=self._key)
            chain.append(root.digest())
        digest, size = chain[-1], self._page_size
        for first in range((len(chain) - 1) * size, num_pages * size, size):
            page = self._pack(*tokens[first : first + size])
            digest = hashlib.blake2b(digest + page, digest_size=DIGEST_BYTES).digest()
            chain.append(digest)

    def match(
        self, chain: list[bytes], tokens: SequenceOf[int], salt: str, num_pages: int
    ) -> list[int]:
        """Pages that hold the longest known prefix of tokens, num_pages at most; extends chain.

        Takes no references: share() them before anything else can evict them.
        """
        pages = []
        for count in range(1, num_pages + 1):
            if len(chain) <= count:
                self.extend(chain, tokens, salt, count)
            page = self._page_of.get(chain[count])
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, digests: list[bytes], pages: list[int]) -> None:
        """From now on the pages are what the digests name. The first page of a digest stays; a
        second one with the same content is its owner's alone and becomes free with it."""
        kept = []
        for digest, page in zip(digests, pages):
            if digest not in self._page_of:
                assert page not in self._digest_of, f"page {page} was full before"
                self._page_of[digest] = page
                self._digest_of[page] = digest
                kept.append(page)
        self._pool.keep(kept)

    def clear(self) -> None:
        """The KV pool is lost: nothing published is true any more."""
        self._page_of.clear()
        self._digest_of.clear()
        self._pool.forget_all()

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]

    def check_invariants(self) -> None:
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of
        assert self._pool._kept == set(self._digest_of), "kept and published pages differ"
