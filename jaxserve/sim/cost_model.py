"""CostModel: how long a device step takes, from what it computes.

A step's seconds are a sum of parts, each a count times a price, none negative:

    step      1                         launching it at all
    token     T                         the matrix products and everything else a token costs
    row       S                         sampling
    kv_token  sum of KV lengths         reading the cache, once a row
    pair      sum of chunk * KV length  attention's arithmetic in prefill chunks

Prices are fitted to the steps of a decision log, each weighted so that relative errors count: a
decode step of 5 ms is as much worth getting right as a prefill step of 500.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np

from jaxserve.scheduler.plan import StepPlan

FEWEST_STEPS = 20
PARTS = ("step", "token", "row", "kv_token", "pair")


def features(start_S: np.ndarray, count_S: np.ndarray) -> np.ndarray:
    """The count of each part, float64 [5], of a step whose rows compute count_S tokens from
    start_S on."""
    kv_len_S = start_S + count_S
    pairs = np.dot(np.where(count_S > 1, count_S, 0).astype(np.float64), kv_len_S)
    return np.array([1.0, count_S.sum(), len(count_S), kv_len_S.sum(), pairs])


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds for one of each part. error: mean relative error where it was fitted."""

    price: tuple[float, ...]
    source: str = ""
    steps: int = 0
    error: float = 0.0

    def seconds(self, plan: StepPlan) -> float:
        """Of one step. The product of features() and prices, in a third of the time."""
        step, token, row, kv_token, pair = self.price
        kv_len_S = plan.end_S
        seconds = step + token * plan.num_tokens + row * plan.num_rows
        seconds += kv_token * int(kv_len_S.sum())
        if plan.num_decode < plan.num_rows:
            chunk_S = plan.count_S[plan.num_decode :]
            chunk_S[chunk_S == 1] = 0
            seconds += pair * int(np.dot(chunk_S.astype(np.int64), kv_len_S[plan.num_decode :]))
        return seconds

    def save(self, path: pathlib.Path) -> None:
        record = dataclasses.asdict(self) | {"price": dict(zip(PARTS, self.price))}
        path.write_text(json.dumps(record, indent=1) + "\n")

    @classmethod
    def load(cls, path: pathlib.Path) -> CostModel:
        """Raises ValueError, in one line, for a file that is not a cost model."""
        try:
            record = json.loads(pathlib.Path(path).read_text())
            price = tuple(float(record["price"][part]) for part in PARTS)
            return cls(price, record["source"], record["steps"], record["error"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a cost model: {error!r}") from error

    @classmethod
    def fit(cls, parts_RF: np.ndarray, seconds_R: np.ndarray, source: str = "") -> CostModel:
        """Prices from measured steps, R of them. Raises ValueError when there are too few."""
        if len(seconds_R) < FEWEST_STEPS:
            raise ValueError(
                f"{len(seconds_R)} steps are too few to fit a cost model; record {FEWEST_STEPS}"
            )
        keep_R = _without_outliers(parts_RF, seconds_R)
        parts_RF, seconds_R = parts_RF[keep_R], seconds_R[keep_R]
        price_F = _non_negative_least_squares(
            parts_RF / seconds_R[:, None], np.ones(len(seconds_R))
        )
        error = np.abs(parts_RF @ price_F / seconds_R - 1).mean()
        return cls(tuple(price_F.tolist()), source, len(seconds_R), float(error))


# About one H100 running a model of 8e9 parameters in bfloat16, from public figures: weights of
# 16 GB at 3 TB/s each step, 2 * 8e9 operations a token at 500 TFLOP/s, 128 KiB of KV a token.
EXAMPLE = CostModel(
    (6e-3, 32e-6, 10e-6, 45e-9, 1e-9), source="8e9 parameters on one H100, estimated"
)


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
