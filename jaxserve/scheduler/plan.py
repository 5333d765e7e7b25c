"""StepPlan: one device step, decided. The only thing the scheduler hands on.

Arrays, not row objects: at 256 running sequences a Python object a row would cost more than all
the deciding. Rows that decode come first, then prefill chunks, in the order they were chosen.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.types import Sequence

# Stands for a token that the device has and the host has not read yet: last_token_N of that slot.
ON_DEVICE = -1
PADDING = -2  # in a step's arrays, behind a plan's tokens

# How the reason of an admission out of the policy's own order begins.
BEFORE_LONGER = "admitted before longer ones"


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """One admission, preemption or refusal to run now, and why."""

    sequence_id: tuple[str, int]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """S rows and T tokens for one step. Shapes by the dimension key; all int32 unless said.

    Row r computes tokens token_ids_T[cu_q_len_S1[r]:cu_q_len_S1[r+1]] at positions from start_S[r].
    The arrays are fresh: nobody writes to them after plan() returns. On paper (in a simulation)
    token_ids_T and page_table_SP are empty.
    """

    step: int
    sequences: tuple[Sequence, ...]  # row -> its sequence, for absorb and for sampling parameters
    slot_S: np.ndarray
    generation_S: np.ndarray  # of the slot when planned; absorb drops rows whose slot moved on
    start_S: np.ndarray  # first position computed
    cu_q_len_S1: np.ndarray  # cumulative tokens a row
    samples_S: np.ndarray  # bool: the row reaches its last token, so it brings a new one
    token_ids_T: np.ndarray  # ON_DEVICE where the host does not know the token yet
    page_table_SP: np.ndarray  # pages of the row's slot, null page (0) past its end; as wide as
    # the row with the most pages needs, which is far less than the longest sequence would
    num_decode: int  # rows [0, num_decode) have exactly one token
    admits: tuple[tuple[int, Sequence], ...] = ()  # (slot, sequence) newly given a slot
    admitted: tuple[Decision, ...] = ()
    preempted: tuple[Decision, ...] = ()
    waiting: tuple[Decision, ...] = ()  # the head of the queue and why it did not run; before it
    # those that let it pass until their prefix is computed
    guard: tuple[str, ...] = ()  # signs raised and lowered since the last plan
    budget: int = 0  # tokens that the step might have had
    idle: int = 0  # rows of a static batch that have ended: its steps stay as wide as it began
    # KV pages to copy before the step, all those out before those in:
    swap_out: tuple[tuple[int, int], ...] = ()  # (page, host page)
    swap_in: tuple[tuple[int, int], ...] = ()  # (host page, page)

    @property
    def count_S(self) -> np.ndarray:
        """Tokens of each row."""
        return self.cu_q_len_S1[1:] - self.cu_q_len_S1[:-1]

    @property
    def end_S(self) -> np.ndarray:
        """Each row's tokens with KV when the step is done."""
        return self.start_S + self.count_S

    @property
    def num_rows(self) -> int:
        return len(self.slot_S)

    @property
    def num_tokens(self) -> int:
        return int(self.cu_q_len_S1[-1])

    @property
    def size(self) -> int:
        """Tokens that the device computes: those of its rows, and one for each idle one."""
        return self.num_tokens + self.idle
