"""jaxserve serves language models from JAX on TPU, GPU and CPU.

The idea is continuous batching: fixed-shape compiled steps run over a preallocated array of slots
and pages of KV; between steps a scheduler on the host removes finished sequences and refills the
freed room at once. Five stages stay visible in the code:

  queue and track      scheduler/scheduler.py  add, abort
  form the group       scheduler/scheduler.py  plan: a StepPlan
  advance each one     engine/runner.py        dispatch, fetch; engine/step.py is what runs
  remove the finished  scheduler/scheduler.py  absorb: TokenEvents
  refill at once       the next plan

Start with engine/core.py, the loop that turns these into tokens.
"""

from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.llm import LLM
from jaxserve.types import RequestOutput, SamplingParams

__all__ = ["LLM", "AsyncEngine", "RequestOutput", "SamplingParams"]
