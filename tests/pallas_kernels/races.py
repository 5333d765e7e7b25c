"""Races in kernels that Pallas' TPU interpreter runs, found in time for kernels of many accesses.

The interpreter's own detector compares an access with all before it, and forgets a kernel when the
next one starts.
"""

import collections
import operator

from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import interpret_pallas_call, race_detection_state

KERNELS = []  # detectors of the kernels that ran since the list was cleared


class Races(race_detection_state.RaceDetectionState):
    """The detector of one kernel, see `watch`.

    Two accesses of one place by two agents (the core, or one DMA) race when one writes and neither
    happened before the other. An agent's own are in order. Of what an agent read or wrote in a
    place, the last is kept, and nothing that a later write of that place came after: an access that
    is not ordered with what is forgotten is not ordered with that either.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        KERNELS.append(self)
        # buffer -> agent -> {(place, whether it writes): (clock, range, line)}
        self.known = collections.defaultdict(lambda: collections.defaultdict(dict))

    def check_read(self, device, core, clock, buffer, place, source_info=None):
        self.check(buffer, (device, core), clock.tolist(), place, source_info, writes=False)

    def check_write(self, device, core, clock, buffer, place, source_info=None):
        self.check(buffer, (device, core), clock.tolist(), place, source_info, writes=True)

    def check(self, buffer, agent, clock, ranges, source_info, *, writes):
        place = tuple((r.start, r.stop) if isinstance(r, slice) else r for r in ranges)
        line = source_info_util.summarize(source_info) if source_info else "pallas_call"
        overlap = race_detection_state._ranges_overlap
        with self.lock:
            agents = self.known[buffer]
            for other in [other for other in agents if other != agent]:
                accesses = agents[other]
                for key, (earlier, other_ranges, other_line) in list(accesses.items()):
                    if not (writes or key[1]):
                        continue
                    if happened_before(earlier, clock):
                        if writes and key[0] == place:
                            del accesses[key]
                    elif not happened_before(clock, earlier) and overlap(ranges, other_ranges):
                        print(f"race in {buffer}: {line}, {ranges}; {other_line}, {other_ranges}")
                        self.races_found = True
                if not accesses:
                    del agents[other]
            agents[agent][place, writes] = clock, ranges, line


def happened_before(x, y):
    return x != y and all(map(operator.le, x, y))


def watch():
    """From now on the interpreter makes its detectors of this kind."""
    interpret_pallas_call.RaceDetectionState = Races
