"""Keys: which routes they guard, how files spell them, whose cache a request may share."""

import hashlib

import pytest
from fake_engine import FakeEngine
from test_completions import error_of

from jaxserve.server.auth import KeyRing
from tests.server.conftest import Client

KEYS = {"alice": "key-of-alice", "bob": "key-of-bob"}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(tmp_path):
    file = tmp_path / "keys"
    hashed = hashlib.sha256(KEYS["bob"].encode()).hexdigest()
    file.write_text(f"# our keys\n\n{KEYS['alice']}\nsha256:{hashed}\n")
    return Client(FakeEngine(), api_keys_file=str(file))


def routes(client):
    """Every path the application has, from its own document."""
    document = client.get("/openapi.json", headers=bearer(KEYS["alice"])).json()
    return [*document["paths"], "/openapi.json"]


def test_every_route_but_the_probes_wants_a_key(guarded):
    paths = routes(guarded)
    assert {"/v1/completions", "/v1/models", "/metrics", "/tokenize", "/version"} <= set(paths)
    for path in paths:
        for method in ("GET", "POST", "HEAD", "OPTIONS"):
            status = guarded.request(method, path).status_code
            if path in ("/live", "/ready", "/health", "/"):
                assert status != 401, path
            else:
                assert status == 401, (method, path)


@pytest.mark.parametrize(
    "path",
    ["//v1/models", "/V1/models", "/v1/../metrics", "/live/../v1/models", "/live/", "/health%2f",
     "/%6cive/../metrics", "/v1/models?x=/live", "/LIVE", "/live;/v1/models", "/nothing", "//live"],
)  # fmt: skip
def test_no_path_slips_past(guarded, path):
    assert guarded.get("http://test" + path).status_code == 401


@pytest.mark.parametrize(
    "key", ["", "key-of-alic", "key-of-alicee", "KEY-OF-ALICE", "é", "x" * 9999]
)
def test_wrong_keys(guarded, key):
    headers = {"Authorization": f"Bearer {key}".encode()}
    response = guarded.get("/v1/models", headers=headers)
    error = error_of(response, 401)
    assert error["code"] == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"
    assert KEYS["alice"] not in response.text


@pytest.mark.parametrize("scheme", ["Basic", "Token", ""])
def test_only_bearer(guarded, scheme):
    headers = {"Authorization": f"{scheme} {KEYS['alice']}"}
    assert guarded.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("name", KEYS)
def test_right_keys_plain_and_hashed_in_both_headers(guarded, name):
    assert guarded.get("/v1/models", headers=bearer(KEYS[name])).status_code == 200
    assert guarded.get("/v1/models", headers={"x-api-key": KEYS[name]}).status_code == 200


def test_tenants_never_share_prefix_pages(guarded):
    ask = lambda key, **body: guarded.post(
        "/v1/completions", {"prompt": "a", "max_tokens": 1, **body}, headers=bearer(KEYS[key])
    )
    for key, body in [("alice", {}), ("alice", {}), ("bob", {}), ("bob", {"cache_salt": "s"}),
                      ("alice", {"cache_salt": "s"})]:  # fmt: skip
        assert ask(key, **body).status_code == 200
    first, again, other, other_salted, salted = guarded.engine.calls
    assert first.tenant == again.tenant != other.tenant
    assert first.cache_salt == again.cache_salt != ""
    salts = {call.cache_salt for call in (first, other, other_salted, salted)}
    assert len(salts) == 4
    assert all(KEYS[name] not in call.tenant + call.cache_salt
               for name in KEYS for call in guarded.engine.calls)  # fmt: skip


def test_without_keys_all_share_unless_salted(client, engine):
    client.complete(prompt="a", max_tokens=1)
    client.complete(prompt="a", max_tokens=1, cache_salt="s")
    assert engine.calls[0].cache_salt == "" != engine.calls[1].cache_salt


def test_an_empty_key_file_is_refused(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# nothing\n")
    with pytest.raises(ValueError, match="no keys"):
        KeyRing.load(str(file))


def test_preflight_needs_no_key_and_other_origins_learn_nothing(tmp_path):
    file = tmp_path / "keys"
    file.write_text("k\n")
    client = Client(FakeEngine(), api_keys_file=str(file), allowed_origins="http://good")
    preflight = {"Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    good = client.request(
        "OPTIONS", "/v1/completions", headers={"Origin": "http://good", **preflight}
    )
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == "http://good"
    bad = client.request("OPTIONS", "/v1/completions", headers={"Origin": "http://x", **preflight})
    assert "access-control-allow-origin" not in bad.headers and bad.status_code == 400
    for origin, allowed in (("http://good", True), ("http://x", False)):
        answer = client.get("/v1/models", headers={"Origin": origin, **bearer("k")})
        assert ("access-control-allow-origin" in answer.headers) == allowed
    unauthorised = client.get("/v1/models", headers={"Origin": "http://good"})
    assert unauthorised.status_code == 401
    assert "access-control-allow-origin" in unauthorised.headers, "the page may read why"
