"""What the workers of tools/bench_peers.py share: requests in as a line of JSON, times out as one.

A worker says {"ready": version}; then for each line, a list of {"prompt_ids", "max_tokens"} and, if
they come one by one, "arrival_s" after the start, it answers {"seconds", "output_tokens",
"requests": [{"sent", "tokens", "stamps"}]}: when each request was due, how many tokens it got, and
when some came.
"""

import collections
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Engine:
    """submit(number, request) hands a request over. step() runs, or waits a moment, and gives
    (number, new tokens, whether that was its end) for whatever got tokens."""

    version: str
    submit: Callable[[int, dict], None]
    step: Callable[[], Iterable[tuple[int, int, bool]]]


def run(engine: Engine, requests: list[dict]) -> dict:
    """Serves the requests as they come due. A request is sent when it is due, whatever the engine
    is at: it waits for the end of a step as it would in front of a server."""
    due = [request.get("arrival_s", 0.0) for request in requests]
    waiting = collections.deque(sorted(range(len(requests)), key=due.__getitem__))
    stamps, counts = [[] for _ in requests], [0] * len(requests)
    served = set()
    begin = time.perf_counter()
    while waiting or served:
        now = time.perf_counter() - begin
        while waiting and due[waiting[0]] <= now:
            number = waiting.popleft()
            engine.submit(number, requests[number])
            served.add(number)
        if not served:
            time.sleep(due[waiting[0]] - now)
            continue
        for number, tokens, ended in engine.step():
            counts[number] += tokens
            if tokens:
                stamps[number].append(time.perf_counter() - begin)
            if ended:
                served.discard(number)
    return {
        "seconds": max((times[-1] for times in stamps if times), default=0.0),
        "output_tokens": sum(counts),
        "requests": [
            {"sent": sent, "tokens": count, "stamps": times}
            for sent, count, times in zip(due, counts, stamps)
        ],
    }


def answer(engine: Engine, out=sys.stdout) -> None:
    """Until there are no more lines."""
    print(json.dumps({"ready": engine.version}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(engine, json.loads(line))), file=out, flush=True)
