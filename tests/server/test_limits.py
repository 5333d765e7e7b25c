"""What raw sockets may do to the server: sizes, slowness, pipelining. All with small limits."""

import contextlib
import socket
import time

import pytest
from fake_engine import FakeEngine

from jaxserve.server import limits
from tests.server.conftest import http, serving

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def running():
    with serving(FakeEngine(), max_body_bytes=2048) as running:
        yield running
        assert http.get(running.url + "/health").status_code == 200


@pytest.fixture(scope="module")
def impatient():
    """A server that waits half a second for a client."""
    with serving(FakeEngine(), max_body_bytes=2048, client_timeout_s=0.5) as running:
        yield running
        assert http.get(running.url + "/health").status_code == 200


@contextlib.contextmanager
def connected(running):
    with socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1]))) as connection:
        connection.settimeout(60)
        yield connection


def answer_to(running, *pieces) -> bytes:
    """Everything the server says to these bytes until it closes or a whole response is there."""
    with connected(running) as connection:
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
        return read_response(connection)


def read_response(connection) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while b"\r\n\r\n" not in data:
            more = connection.recv(65536)
            if not more:
                return data
            data += more
        head, _, rest = data.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        while len(rest) < length:
            rest += connection.recv(65536)
        return head + b"\r\n\r\n" + rest
    return data


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    assert b'{"error":{"message":' in answer or answer[9:12] == b"200"
    return int(answer[9:12])


def complete(length: int) -> bytes:
    body = b'{"prompt": "a"}'
    body += b" " * (length - len(body))
    return POST + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n" + body


def test_bodies_up_to_the_limit_pass(running):
    assert status_of(answer_to(running, complete(2048))) == 200
    assert status_of(answer_to(running, complete(2049))) == 413


def test_a_declared_giant_is_refused_unread(running):
    head = POST + b"Content-Length: 1000000000000\r\n\r\n"
    assert status_of(answer_to(running, head)) == 413
    absurd = POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n"
    assert status_of(answer_to(running, absurd)) in (400, 413)


def test_an_endless_body_without_length_is_refused(running):
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    answer = answer_to(running, POST + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 3)
    assert status_of(answer) == 413


def test_a_body_in_countless_chunks(running, monkeypatch):
    monkeypatch.setattr(limits, "MAX_CHUNKS", 4)
    with connected(running) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(8):
                connection.sendall(b"1\r\n \r\n")
                time.sleep(0.02)  # each its own packet
        assert status_of(read_response(connection)) == 413


@pytest.mark.parametrize(
    "head",
    [
        b"X-Big: " + b"a" * 100_000 + b"\r\n",
        b"".join(b"h%d: 1\r\n" % i for i in range(10_000)),
        b"".join(b"h%d: 1\r\n" % i for i in range(limits.MAX_HEADERS)),
        b"X-Big: " + b"a" * (limits.MAX_HEADER_BYTES - 17) + b"\r\n",
    ],
    ids=["one-large", "10000", "many-small", "just-above"],
)
def test_headers_too_large_or_too_many(running, impatient, head):
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n"
    assert status_of(answer_to(running, whole)) == 431
    # The same, arriving bit by bit and never finished.
    assert status_of(answer_to(impatient, b"GET / HTTP/1.1\r\n", head, b"X: y")) in (431, 408)


@pytest.mark.parametrize(
    "data", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" * 9 + b"\r\n\r\n"]
)
def test_what_is_not_http(running, data):
    assert status_of(answer_to(running, data)) == 400


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", POST + b"Content-Length: 9\r\n\r\n{"],
)
def test_senders_that_stop_are_closed(impatient, sent):
    start = time.monotonic()
    with connected(impatient) as connection:
        connection.sendall(sent)
        answer = read_response(connection)
    assert status_of(answer) == 408
    assert 0.3 < time.monotonic() - start < 30, "long before the 60 s of the default"


def test_dripping_headers_do_not_move_the_deadline(impatient):
    with connected(impatient) as connection:
        answer, end = b"", time.monotonic() + 60
        connection.settimeout(0.05)
        while not answer and time.monotonic() < end:
            with contextlib.suppress(OSError):
                connection.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(65536)
    assert status_of(answer) in (408, 400)


def test_pipelined_requests_are_answered_in_order(running):
    gets = b"".join(
        b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % path for path in (b"version", b"health", b"nope")
    )
    with connected(running) as connection:
        connection.sendall(gets)
        data = b""
        while data.count(b"HTTP/1.1 ") < 3 or b"not_found" not in data:
            data += connection.recv(65536)
    assert data.index(b'"version"') < data.index(b'"status"') < data.index(b"not_found")


def test_a_reader_that_stops_reading_is_dropped():
    engine = FakeEngine(max_model_len=200_000)
    with serving(engine, client_timeout_s=1.0) as running, connected(running) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # 128 echoes of the prompt: more than the buffers of any kernel hold.
        prompt = b"a" * 150_000
        body = b'{"prompt": "%s", "n": 128, "stream": true, "echo": true, "max_tokens": 9}' % prompt
        head = POST + b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n"
        connection.sendall(head + body)
        end = time.monotonic() + 60
        while not engine.aborted and time.monotonic() < end:
            time.sleep(0.02)
        assert len(engine.aborted) == 1 and engine.open == {}
        assert http.get(running.url + "/health").status_code == 200
