"""PrefixCache: finds the pages that already hold the KV of a prompt's beginning.

The KV of a token depends on all tokens before it, so a page is named by a digest chained over
them: digest(page i) = H(digest(page i-1), tokens of page i), beginning with the digest of the
request's cache salt. H is blake2b with a secret key of the process: nobody can construct two
prompts that collide, and equal digests mean equal tokens and equal salt.

Only full pages whose KV a finished step has written are published. Nobody writes to such a page
again while it is published: its owner continues in the next page, and a sequence that hits it
recomputes at least its last token, which lies in a page of its own.
"""

from __future__ import annotations

import array
import hashlib
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
            chain.append(self._digest(salt.encode()))
        done = len(chain) - 1
        if done >= num_pages:
            return
        size = self._page_size
        data = memoryview(array.array("i", tokens[done * size : num_pages * size]))
        for first in range(0, (num_pages - done) * size, size):
            chain.append(self._digest(chain[-1], data[first : first + size]))

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

    def publish(self, digest: bytes, page: int) -> None:
        """From now on the page is what `digest` names. The first page of a digest stays; a second
        one with the same content is its owner's alone and becomes free with it."""
        if digest not in self._page_of and page not in self._digest_of:
            self._page_of[digest] = page
            self._digest_of[page] = digest
            self._pool.keep(page)

    def clear(self) -> None:
        """The KV pool is lost: nothing published is true any more."""
        self._page_of.clear()
        self._digest_of.clear()
        self._pool.forget_all()

    def _forget(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]

    def _digest(self, *parts) -> bytes:
        state = hashlib.blake2b(digest_size=DIGEST_BYTES, key=self._key)
        for part in parts:
            state.update(part)
        return state.digest()

    def check_invariants(self) -> None:
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of
        assert self._pool._kept == set(self._digest_of), "kept and published pages differ"
