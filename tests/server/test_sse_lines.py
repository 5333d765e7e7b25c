"""An event is one line to every client, also to those that split lines as Unicode does."""

import json

from jaxserve.server import sse

SAID = "a\x85b\u2028c\u2029d\n\x0b\x0c\x1ce"


def test_text_that_ends_lines_stays_in_its_event():
    writer = sse.ChunkWriter({"model": SAID}, usage=None)
    chunk = writer.choice({"text": SAID})
    (line, end) = chunk.decode().splitlines()
    assert end == "" and json.loads(line.removeprefix("data: ")) == {
        "model": SAID, "choices": [{"text": SAID}], "usage": None
    }  # fmt: skip
    (line, end) = sse.event({"text": SAID}).decode().splitlines()
    assert end == "" and json.loads(line.removeprefix("data: ")) == {"text": SAID}
