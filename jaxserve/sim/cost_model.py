"""CostModel: how long a device step takes, from what it computes.

A step's seconds are a sum of parts, each a count times a price, none negative:

    step      1                         launching it at all
    token     T, padded                 the matrix products and everything else a token costs
    row       S                         sampling
    kv_token  sum of KV lengths         reading the cache, once a row
    pair      sum of chunk * KV length  attention's arithmetic in prefill chunks
    page      pages copied              KV of preempted sequences to the host's memory, or back

A compiled step has one of a few sizes and computes what it is padded by as well: the token part
counts the smallest of `sizes` that holds the step. Small ones do not cost in proportion (a single
token is a matrix-vector product): for each size there is a factor on the sum, the median of what
its steps took beside what the parts say.

Prices are fitted to the steps of a decision log, each weighted so that relative errors count: a
decode step of 5 ms is as much worth getting right as a prefill step of 500.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np

from jaxserve.scheduler.limits import padded, step_sizes
from jaxserve.scheduler.plan import StepPlan

FEWEST_STEPS = 20
FEWEST_OF_A_SIZE = 3
PARTS = ("step", "token", "row", "kv_token", "pair", "page")
# Counts that grow with a prompt's length, the one of attention with its square. A price for them
# that makes a fit no better is noise, and on prompts longer than those seen it would be all there
# is: without it, it is zero.
GROWING = (PARTS.index("pair"), PARTS.index("kv_token"))
NO_WORSE = 1.03


def features(
    start_S: np.ndarray,
    count_S: np.ndarray,
    num_copied: int = 0,
    sizes: tuple[int, ...] = (),
    idle: int = 0,
) -> np.ndarray:
    """The count of each part, float64 [6], of a step whose rows compute count_S tokens from
    start_S on beside `idle` rows of padding, and before which num_copied pages travel."""
    kv_len_S = start_S + count_S
    pairs = np.dot(np.where(count_S > 1, count_S, 0).astype(np.float64), kv_len_S)
    tokens = padded(int(count_S.sum()) + idle, sizes)
    return np.array([1.0, tokens, len(count_S), kv_len_S.sum(), pairs, num_copied])


def features_of(plan: StepPlan, sizes: tuple[int, ...] = ()) -> np.ndarray:
    num_copied = len(plan.swap_out) + len(plan.swap_in)
    return features(plan.start_S, plan.count_S, num_copied, sizes, plan.idle)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds for one of each part; the sizes that steps are padded to, none when they are not, and
    a factor for each. error: mean relative error where it was fitted."""

    price: tuple[float, ...]
    sizes: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    source: str = ""
    steps: int = 0
    error: float = 0.0

    def seconds(self, plan: StepPlan) -> float:
        """Of one step. The product of features_of() and prices, in a third of the time, and the
        factor of its size."""
        step, token, row, kv_token, pair, page = self.price
        num_rows, num_tokens = len(plan.slot_S), plan.num_tokens
        tokens = padded(plan.size, self.sizes)
        seconds = step + token * tokens + row * num_rows
        seconds += kv_token * (int(np.add.reduce(plan.start_S)) + num_tokens)
        if plan.num_decode < num_rows:
            chunks = plan.count_S[plan.num_decode :].tolist()
            starts = plan.start_S[plan.num_decode :].tolist()
            pairs = (chunk * (first + chunk) for chunk, first in zip(chunks, starts) if chunk > 1)
            seconds += pair * sum(pairs)
        if plan.swap_out or plan.swap_in:
            seconds += page * (len(plan.swap_out) + len(plan.swap_in))
        return seconds * self.factors[self.sizes.index(tokens)] if tokens in self.sizes else seconds

    def with_budget(self, token_budget: int) -> CostModel:
        """The same prices where steps have the sizes of another token budget."""
        sizes, known = step_sizes(token_budget), dict(zip(self.sizes, self.factors))
        if self.sizes in ((), sizes):
            return self
        factors = tuple(known.get(size, 1.0) for size in sizes)
        return dataclasses.replace(self, sizes=sizes, factors=factors)

    def save(self, path: pathlib.Path) -> None:
        record = dataclasses.asdict(self) | {"price": dict(zip(PARTS, self.price))}
        path.write_text(json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, path: pathlib.Path) -> CostModel:
        """Raises ValueError, in one line, for a file that is not a cost model."""
        try:
            record = json.loads(pathlib.Path(path).read_text())
            price = tuple(float(record["price"][part]) for part in PARTS)
            sizes = tuple(int(size) for size in record["sizes"])
            factors = tuple(float(factor) for factor in record["factors"])
            if len(sizes) != len(factors):
                raise ValueError("sizes and factors go together")
            return cls(price, sizes, factors, record["source"], record["steps"], record["error"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a cost model: {error!r}") from error

    @classmethod
    def fit(
        cls,
        parts_RF: np.ndarray,
        seconds_R: np.ndarray,
        *,
        sizes: tuple[int, ...] = (),
        page_s: float = 0.0,
        source: str = "",
    ) -> CostModel:
        """Prices from measured steps, R of them, with these sizes. page_s: price of a page where no
        step has any copied. Raises ValueError when there are too few steps."""
        if len(seconds_R) < FEWEST_STEPS:
            raise ValueError(
                f"{len(seconds_R)} steps are too few to fit a cost model; record {FEWEST_STEPS}"
            )
        keep_R = _without_outliers(parts_RF, seconds_R)
        parts_RF, seconds_R = parts_RF[keep_R], seconds_R[keep_R]
        price_F, factors, error = _prices(parts_RF, seconds_R, sizes)
        for part in GROWING:
            fewer_RF = np.where(np.arange(len(PARTS)) == part, 0.0, parts_RF)
            without = _prices(fewer_RF, seconds_R, sizes)
            if without[-1] <= NO_WORSE * error:
                parts_RF, (price_F, factors, error) = fewer_RF, without
        if not parts_RF[:, -1].any():
            price_F[-1] = page_s
        return cls(tuple(price_F.tolist()), sizes, factors, source, len(seconds_R), error)


# About one H100 running a model of 8e9 parameters in bfloat16, from public figures: weights of
# 16 GB at 3 TB/s each step, 2 * 8e9 operations a token at 500 TFLOP/s, 128 KiB of KV a token; pages
# of 16 tokens over a bus of 25 GB/s.
EXAMPLE = CostModel(
    (6e-3, 32e-6, 10e-6, 45e-9, 1e-9, 84e-6), source="8e9 parameters on one H100, estimated"
)


def _prices(parts_RF: np.ndarray, seconds_R: np.ndarray, sizes: tuple[int, ...]):
    """(price_F, factors, mean relative error) of the best fit."""
    price_F = _non_negative_least_squares(parts_RF / seconds_R[:, None], np.ones(len(seconds_R)))
    ratio_R = seconds_R / (parts_RF @ price_F)
    factors = tuple(_factor(ratio_R[parts_RF[:, 1] == size]) for size in sizes)
    known = dict(zip(sizes, factors))
    error = np.abs([known.get(t, 1.0) / r - 1 for t, r in zip(parts_RF[:, 1], ratio_R)]).mean()
    return price_F, factors, float(error)


def _factor(ratio_R: np.ndarray) -> float:
    """Median; of too few steps to tell, 1."""
    return float(np.median(ratio_R)) if len(ratio_R) >= FEWEST_OF_A_SIZE else 1.0


def _without_outliers(parts_RF: np.ndarray, seconds_R: np.ndarray) -> np.ndarray:
    """Drops steps that took several times what their like took: a pause of the machine, not a cost.

    Steps are alike when their token counts share a power of two.
    """
    kind_R = np.ceil(np.log2(np.maximum(parts_RF[:, 1], 1))).astype(int)
    keep_R = seconds_R > 0
    for kind in np.unique(kind_R):
        same_R = kind_R == kind
        keep_R &= ~same_R | (seconds_R < 4 * np.median(seconds_R[same_R]))
    return keep_R


def _non_negative_least_squares(a_RF: np.ndarray, b_R: np.ndarray) -> np.ndarray:
    """x_F >= 0 that minimises |a x - b|, by coordinate descent on the normal equations."""
    scale_F = np.linalg.norm(a_RF, axis=0)
    scale_F[scale_F == 0] = 1.0
    a_RF = a_RF / scale_F
    gram_FF, target_F = a_RF.T @ a_RF, a_RF.T @ b_R
    x_F = np.zeros(len(target_F))
    for _ in range(20_000):
        before_F = x_F.copy()
        for part in range(len(x_F)):
            if gram_FF[part, part]:
                step = (target_F[part] - gram_FF[part] @ x_F) / gram_FF[part, part]
                x_F[part] = max(0.0, x_F[part] + step)
        if np.abs(x_F - before_F).max() <= 1e-12 * max(1.0, np.abs(x_F).max()):
            break
    return x_F / scale_F
