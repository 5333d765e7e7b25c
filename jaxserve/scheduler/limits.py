"""Limits: what this engine can hold, and the requests it refuses at the door because of that.

A request that can never run must not queue: it would wait for ever and everyone behind it too.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from jaxserve.config import EngineConfig
from jaxserve.types import Request, RequestRefused


def step_sizes(token_budget: int) -> tuple[int, ...]:
    """Tokens that steps are padded to, one compiled program each.

    Powers of four while a step is small, then the budget's eighth, quarter, half and three
    quarters: a refilled slot makes steps of any size up to the budget, and what a step is padded
    by costs as much as what it is for.
    """
    largest = 1 << (token_budget - 1).bit_length()
    small = {4**power for power in range(16) if 4**power < largest}
    parts = {largest * eighths // 8 for eighths in (1, 2, 4, 6)}
    return tuple(sorted({*small, *(part for part in parts if part >= 32), largest}))


def padded(num_tokens: int, sizes: tuple[int, ...]) -> int:
    """The smallest of the sizes (ascending) that holds so many tokens; without one, no padding."""
    place = bisect.bisect_left(sizes, num_tokens)
    return sizes[place] if place < len(sizes) else num_tokens


@dataclasses.dataclass(frozen=True)
class Limits:
    """The shape of the engine. With the policy settings it determines every plan."""

    num_slots: int
    num_pages: int  # with the null page, so num_pages - 1 can be held
    page_size: int  # tokens
    token_budget: int  # tokens a step
    max_model_len: int  # prompt + output tokens of a sequence
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    prefix_caching: bool = True
    batching: str = "continuous"
    max_queued: int = 1024  # requests
    max_queued_tokens: int = 4_000_000  # prompt tokens
    host_pages: int = 0  # pages of host memory for the KV of preempted sequences
    swap_s_per_page: float = 0.0  # seconds that a page takes there and back

    def __post_init__(self):
        assert self.num_slots >= 1 and self.num_pages >= 2 and self.page_size >= 1
        assert self.token_budget >= self.num_slots, "every running row needs a token a step"
        assert self.batching in ("continuous", "static")

    @classmethod
    def of_engine(
        cls, engine: EngineConfig, eos_ids: Iterable[int], vocab_size: int, page_bytes: int = 0
    ) -> Limits:
        """Of an engine whose num_pages and max_model_len are worked out. page_bytes: size of a KV
        page, needed when the host is to keep some."""
        names = {field.name for field in dataclasses.fields(engine)}
        names &= {field.name for field in dataclasses.fields(cls)}
        shared = {name: getattr(engine, name) for name in names}
        if engine.host_kv_gib:
            shared["host_pages"] = int(engine.host_kv_gib * 2**30 / page_bytes)
            shared["swap_s_per_page"] = 2 * page_bytes / (engine.host_kv_gib_per_s * 2**30)
        return cls(vocab_size=vocab_size, eos_ids=tuple(sorted(eos_ids)), **shared)

    @property
    def pages_per_row(self) -> int:
        """P: pages of the longest sequence."""
        return self.pages_for(self.max_model_len)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the whole pool holds."""
        return (self.num_pages - 1) * self.page_size

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def max_total(self, request: Request) -> int:
        """Tokens at which a sequence of this request ends with LENGTH.

        The smallest of what it asks, what the model takes, and what the pool holds: a sequence
        alone in the pool can compute kv_tokens tokens and sample one more from the last of them.
        So a sequence that is alone never lacks a page, which is why preemption always has an end.
        """
        most = min(self.max_model_len, self.kv_tokens + 1)
        if request.params.max_tokens is None:
            return most
        return min(most, len(request.prompt_ids) + request.params.max_tokens)

    def check(self, request: Request) -> None:
        """Raises RequestRefused when the request can never run here."""
        length = len(request.prompt_ids)
        if length == 0:
            raise RequestRefused("the prompt has no tokens", param="prompt")
        if length >= self.max_model_len:
            raise RequestRefused(
                f"the prompt has {length} tokens and the model takes {self.max_model_len} for "
                "prompt and output together; shorten the prompt",
                code="context_length_exceeded",
                param="prompt",
            )
        needed, held = self.pages_for(length + 1), self.num_pages - 1
        if needed > held:
            raise RequestRefused(
                f"the prompt needs {needed} KV pages of {self.page_size} tokens and the engine "
                f"has {held}; shorten the prompt or start the engine with more pages",
                code="capacity_exceeded",
                param="prompt",
            )
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self.vocab_size:
            raise RequestRefused(
                f"prompt token ids must be between 0 and {self.vocab_size - 1}", param="prompt"
            )
