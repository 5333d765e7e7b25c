"""One request's life, told from a decision log in sentences."""

from __future__ import annotations

import collections
import dataclasses
import pathlib

from jaxserve.obs.decision_log import read
from jaxserve.scheduler.plan import BEFORE_LONGER

_MOVED_OUT = -1  # as a slot: its last token is on the way, and another has its slot


@dataclasses.dataclass
class _Choice:
    """What is known of one choice while reading on."""

    slot: int | None = None
    queued_at: float = 0.0
    waited_s: float = 0.0
    waited_later_s: float = 0.0  # of that, after its first token
    first_chunk_at: float | None = None
    chunks: list[int] = dataclasses.field(default_factory=list)
    decode_steps: int = 0
    first_token_at: float | None = None
    reasons: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    passed_by: int = 0  # meanwhile, those admitted before longer ones
    ended: bool = False


class _Story:
    """Reads lines, writes sentences. Times are told from the request's arrival."""

    def __init__(self, request_id: str):
        self.request_id = request_id
        self.sentences: list[str] = []
        self.request: dict | None = None
        self.alike: list[str] = []  # ids with this one in them, as that of an X-Request-Id is
        self.choices: dict[int, _Choice] = {}
        self.planned: dict[int, list[tuple[int, bool]]] = {}  # step -> (choice, brings a token)
        self.running: set[tuple[str, int]] = set()  # everybody's sequences
        self.last_now = 0.0

    def tell(self, now: float, sentence: str) -> None:
        self.sentences.append(f"{now - self.request['arrival']:9.3f} s  {sentence}")

    # Calls

    def call(self, name: str, *arguments) -> None:
        handler = getattr(self, f"_{name}", None)
        if handler is not None:
            handler(*arguments)

    def _add(self, record: dict) -> None:
        if record["id"] != self.request_id:
            if self.request_id in record["id"]:
                self.alike.append(record["id"])
            return
        self.request = record
        choices = record["params"].get("n", 1)
        self.choices = {index: _Choice(queued_at=record["arrival"]) for index in range(choices)}
        limit = record["params"].get("max_tokens", 16)
        self.tell(
            record["arrival"],
            f"Arrived with {len(record['prompt_ids'])} prompt tokens, asking for {choices} "
            f"choice{'s' * (choices > 1)} of up to {'all the' if limit is None else limit} tokens"
            + (f", as {record['tenant']!r}" if record["tenant"] else "")
            + f". {len(self.running)} sequence{'s' * (len(self.running) != 1)} ran.",
        )

    def _refused(self, record: dict, reason: str) -> None:
        if record["id"] == self.request_id:
            self.request = record
            self.tell(record["arrival"], f"Refused: {reason}.")

    def _absorb(self, step: int, now: float, _tokens, ends, _scores) -> None:
        for index, reaches_end in self.planned.pop(step, ()):
            choice = self.choices[index]
            if reaches_end and choice.first_token_at is None and not choice.ended:
                choice.first_token_at = now
                self.tell(
                    now,
                    f"Choice {index}: first token, after {len(choice.chunks)} "
                    f"chunk{'s' * (len(choice.chunks) != 1)} ({_join(choice.chunks)} tokens).",
                )
        self.last_now = now
        self._ended(ends)

    def _leave_out(self, step: int, _row: int, request_id: str, index: int) -> None:
        """The step brings it no token: its grammar has not said yet what may come."""
        if request_id == self.request_id and step in self.planned:
            self.planned[step] = [
                (choice, reaches_end and choice != index)
                for choice, reaches_end in self.planned[step]
            ]

    def _ended(self, ends) -> None:
        for request_id, index, reason in ends:
            self.running.discard((request_id, index))
            if request_id == self.request_id and not self.choices[index].ended:
                self._end(index, self.last_now, reason)

    def _finish(self, request_id: str, index: int, reason: str, stop_reason) -> None:
        self.running.discard((request_id, index))
        if request_id == self.request_id and not self.choices[index].ended:
            why = reason if stop_reason is None else f"{reason} ({stop_reason!r})"
            self._end(index, self.last_now, why)

    def _abort(self, request_id: str) -> None:
        self.running = {other for other in self.running if other[0] != request_id}
        if request_id == self.request_id:
            for index, choice in self.choices.items():
                if not choice.ended:
                    self._end(index, self.last_now, "abort")

    def _fail_all(self, message: str) -> None:
        self.running.clear()
        for index, choice in self.choices.items():
            if not choice.ended:
                self._end(index, self.last_now, f"error: {message}")

    def _fail_running(self, message: str) -> None:
        self.running.clear()
        for index, choice in self.choices.items():
            if choice.slot is not None and not choice.ended:
                self._end(index, self.last_now, f"error: {message}")

    def _requeue_all(self) -> None:
        self.running.clear()
        for choice in self.choices.values():
            if choice.slot is not None:
                choice.slot, choice.queued_at = None, self.last_now

    def _end(self, index: int, now: float, reason: str) -> None:
        choice = self.choices[index]
        if choice.slot is None:
            why = self._waited(choice, now)
            self.tell(now, f"Choice {index}: still queued{why}.")
        choice.ended = True
        begun = choice.first_chunk_at if choice.first_chunk_at is not None else now
        first = choice.first_token_at if choice.first_token_at is not None else now
        self.tell(
            now,
            f"Choice {index}: ended ({reason}) after {choice.decode_steps} decoding steps. Of "
            f"{now - self.request['arrival']:.3f} s it queued {choice.waited_s:.3f} s, prefilled "
            f"{max(0.0, first - begun):.3f} s and decoded "
            f"{max(0.0, now - first - choice.waited_later_s):.3f} s.",
        )

    # Plans

    def plan(self, now: float, plan: dict) -> None:
        self.running.update((request_id, index) for _, request_id, index in plan["admits"])
        for request_id, index, reason in plan["preempted"]:
            self.running.discard((request_id, index))
            if request_id == self.request_id:
                choice = self.choices[index]
                choice.slot, choice.queued_at = None, now
                self.tell(now, f"Choice {index}: lost its place: {reason}.")
        for request_id, index, reason in plan["admitted"]:
            if request_id == self.request_id:
                self._admitted(now, index, reason)
            elif reason.startswith(BEFORE_LONGER):
                self._passed_by()
        for slot, request_id, index in plan["admits"]:
            self._slot_taken(slot)
            if request_id == self.request_id:
                self.choices[index].slot = slot
        self._wait(plan)
        self._rows(now, plan)
        if plan["guard"] and self.request is not None:
            self.tell(now, f"The guard: {'; '.join(plan['guard'])}.")

    def _passed_by(self) -> None:
        for choice in self.choices.values():
            choice.passed_by += choice.slot is None and not choice.ended

    def _slot_taken(self, slot: int) -> None:
        for choice in self.choices.values():
            if choice.slot == slot:
                choice.slot = _MOVED_OUT

    def _admitted(self, now: float, index: int, reason: str) -> None:
        choice = self.choices[index]
        why = self._waited(choice, now)
        self.tell(
            now,
            f"Choice {index}: {reason}, having waited {now - choice.queued_at:.3f} s{why}.",
        )

    def _waited(self, choice: _Choice, now: float) -> str:
        """Books the time in the queue that ends now; says why it was there, empty if unknown."""
        choice.waited_s += now - choice.queued_at
        if choice.first_token_at is not None:
            choice.waited_later_s += now - choice.queued_at
        why = ", ".join(
            f"{reason} ({steps} steps)" for reason, steps in choice.reasons.most_common(3)
        )
        why = f" because {why}" if why else ""
        if choice.passed_by:
            why += f"; meanwhile {choice.passed_by} were admitted before longer ones"
        choice.reasons.clear()
        choice.passed_by = 0
        return why

    def _wait(self, plan: dict) -> None:
        """Why those that are queued did not run in this step. The plan gives the reasons of those
        at the head of the queue; for everybody else it is that the last of these is ahead."""
        if not plan["waiting"]:
            return
        reasons = {(request_id, index): reason for request_id, index, reason in plan["waiting"]}
        last_id, _, last = plan["waiting"][-1]
        for index, choice in self.choices.items():
            if choice.slot is None and not choice.ended:
                own = reasons.get((self.request_id, index))
                choice.reasons[_kind(own) if own else f"{last_id} was ahead: {_kind(last)}"] += 1

    def _rows(self, now: float, plan: dict) -> None:
        mine = {c.slot: i for i, c in self.choices.items() if c.slot is not None and not c.ended}
        rows = []
        for row, slot in enumerate(plan["slot"]):
            index = mine.get(slot)
            if index is None:
                continue
            choice = self.choices[index]
            decodes = row < plan["num_decode"]
            count = 1 if decodes else plan["count"][row - plan["num_decode"]]
            if choice.first_chunk_at is None:
                choice.first_chunk_at = now
            end = plan["start"][row] + count
            if end <= len(self.request["prompt_ids"]):
                choice.chunks.append(count)
            else:
                choice.decode_steps += 1
            rows.append((index, end >= len(self.request["prompt_ids"])))
        if rows:
            self.planned[plan["step"]] = rows


def _kind(reason: str) -> str:
    """A reason without the numbers that change from step to step."""
    return "too few pages were free" if reason.startswith("needs") else reason


def _join(chunks: list[int]) -> str:
    """12 + 16 + 16, shortened when long."""
    shown = [str(count) for count in chunks]
    return " + ".join(shown if len(shown) <= 8 else [*shown[:4], "...", *shown[-2:]])


def explain(path: pathlib.Path, request_id: str) -> list[str]:
    """Sentences on one request: when it came, why it waited, its chunks, where its time went.

    Raises ValueError when the log does not know the request.
    """
    story = _Story(request_id)
    lines = read(path)
    next(lines)
    for line in lines:
        for call in line["calls"]:
            story.call(*call)
        if line["plan"] is not None:
            story.last_now = line["now"]
            story.plan(line["now"], line["plan"])
    if story.request is None:
        alike = f"; did you mean {', '.join(story.alike[:4])}?" if story.alike else ""
        raise ValueError(f"{path} knows no request {request_id!r}{alike}")
    return story.sentences


def run(log: pathlib.Path, *, request: str, out=print) -> int:
    """`jaxserve explain LOG --request=ID`."""
    for sentence in explain(log, request):
        out(sentence)
    return 0
