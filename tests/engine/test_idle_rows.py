"""What a step's arrays hold behind its tokens: a static batch's idle rows, then padding."""

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.engine import pack
from jaxserve.scheduler.plan import PADDING
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import Request, SamplingParams, StepResult


def test_idle_rows_are_computed_and_padding_is_not():
    """Four requests of 2, 2, 6 and 6 tokens, together from prompts of one: from the third step on
    two rows are left, and a static batch computes four."""
    for batching, idle in (("static", 2), ("continuous", 0)):
        config = EngineConfig(num_slots=4, num_pages=32, max_model_len=64, batching=batching)
        scheduler = Scheduler.from_config(config, eos_ids=(), vocab_size=100)
        rows = pack.RowParams(4)
        for number, count in enumerate((2, 2, 6, 6)):
            params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
            scheduler.add(Request(f"r{number}", (7 + number,), params))
        for step in range(3):
            plan = scheduler.plan(float(step))
            for slot, sequence in plan.admits:
                rows.admit(slot, sequence)
            scheduler.absorb(plan, StepResult(np.full(plan.num_rows, 9, np.int32)), float(step))
        inputs, _ = pack.pack(plan, rows, bucket_T=8, num_slots=4, max_pages=4)
        want = [9, 9] + [0] * idle + [PADDING] * (6 - idle)
        np.testing.assert_array_equal(inputs.token_ids_T, want)
