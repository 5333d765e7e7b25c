"""PrefixCache: what is found is what was published, for the same tokens and salt only."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cache.page_pool import PagePool
from jaxserve.cache.prefix_cache import PrefixCache

PAGE = 4


def published(cache, pool, tokens, salt=""):
    """Publishes the full pages of tokens as a finished sequence would; returns them."""
    chain, count = [], len(tokens) // PAGE
    cache.extend(chain, tokens, salt, count)
    pages = pool.reserve(count)
    cache.publish(chain[1:], pages)
    pool.release(pages)
    return pages


def fresh(num_pages=64, key=b"key"):
    pool = PagePool(num_pages)
    return PrefixCache(pool, PAGE, key), pool


def found(cache, tokens, salt=""):
    return cache.match([], tokens, salt, len(tokens) // PAGE)


def test_finds_the_longest_common_prefix_in_whole_pages():
    cache, pool = fresh()
    pages = published(cache, pool, list(range(12)))
    assert found(cache, list(range(12))) == pages
    assert found(cache, [*range(9), 50, 51, 52]) == pages[:2]
    assert found(cache, [*range(7), 50]) == pages[:1]
    assert found(cache, [50, *range(1, 12)]) == []


def test_same_page_after_another_beginning_is_another_page():
    cache, pool = fresh()
    published(cache, pool, [1, 1, 1, 1, 7, 7, 7, 7])
    assert found(cache, [2, 2, 2, 2, 7, 7, 7, 7]) == []
    assert found(cache, [7, 7, 7, 7]) == []


@pytest.mark.parametrize("salt", ["", "b", "aa"])
def test_b040_salts_do_not_share(salt):
    cache, pool = fresh()
    published(cache, pool, list(range(8)), salt="a")
    assert found(cache, list(range(8)), salt) == []
    assert len(found(cache, list(range(8)), "a")) == 2


def test_b040_digests_are_keyed():
    """The same tokens have other digests in another process: hits cannot be computed offline."""
    chains = []
    for key in (b"one", b"two", b""):
        cache, _ = fresh(key=key)
        chain = []
        cache.extend(chain, list(range(8)), "", 2)
        chains.append(chain)
    flat = [digest for chain in chains for digest in chain]
    assert len(set(flat)) == len(flat) == 9
    assert all(len(digest) == 16 for digest in flat)


def test_evicted_pages_are_not_found():
    cache, pool = fresh(num_pages=5)
    pages = published(cache, pool, list(range(16)))
    assert found(cache, list(range(16))) == pages
    pool.reserve(3)
    assert found(cache, list(range(16))) == pages[:1]
    cache.check_invariants()


def test_clear_forgets_everything():
    cache, pool = fresh()
    published(cache, pool, list(range(8)))
    cache.clear()
    assert found(cache, list(range(8))) == [] and len(cache) == 0
    assert pool.num_idle == 0
    pool.check_invariants()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.integers(0, 1), max_size=20), max_size=8), st.data())
def test_agrees_with_comparing_tokens(prompts, data):
    """The oracle keeps the tokens: a page is found iff its whole history was published."""
    cache, pool = fresh()
    known = {}
    for tokens in prompts:
        for count, page in enumerate(published(cache, pool, tokens), 1):
            known.setdefault(tuple(tokens[: count * PAGE]), page)
    wanted = data.draw(st.lists(st.integers(0, 1), max_size=20))
    expected = []
    for count in range(1, len(wanted) // PAGE + 1):
        page = known.get(tuple(wanted[: count * PAGE]))
        if page is None:
            break
        expected.append(page)
    assert found(cache, wanted) == expected
    cache.check_invariants()
    pool.check_invariants()
