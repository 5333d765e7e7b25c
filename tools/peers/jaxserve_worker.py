"""jaxserve without its server, for tools/bench_peers.py: `python jaxserve_worker.py MODEL THREADS
[FLAGS of jaxserve serve]`. See answering.py. It takes the threads that it finds.
"""

import importlib.metadata
import sys
import time

import answering

from jaxserve.bench import offline
from jaxserve.engine import start
from jaxserve.main import cache_dir, parse
from jaxserve.types import Request, SamplingParams
from jaxserve.verbs import VERBS


def engine_of(core) -> answering.Engine:
    served = 0

    def submit(number: int, request: dict) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True)
        name = f"{served}/{number}"  # numbers start again with each run
        core.add(Request(name, tuple(request["prompt_ids"]), params, arrival=core.clock()))

    def step():
        nonlocal served
        for name, delta in core.step():
            if delta.error is not None:
                raise RuntimeError(str(delta.error))
            ended = delta.finish_reason is not None
            yield int(name.split("/")[1]), len(delta.token_ids), ended
        if not core.has_work:
            served += 1

    return answering.Engine(importlib.metadata.version("jaxserve"), submit, step)


def main():
    model, _, *flags = sys.argv[1:]
    (config, scheduling, _), _ = parse(VERBS["serve"], [f"--model={model}", *flags])
    engine = start.build(config, scheduling, clock=time.perf_counter, cache_dir=cache_dir())
    engine.warm_up()
    answering.answer(engine_of(offline.fresh_core(engine, scheduling)))


if __name__ == "__main__":
    main()
