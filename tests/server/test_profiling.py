"""/debug/profile: only where it was asked for, only for keys, short, one at a time, few."""

import asyncio

import pytest
from test_completions import error_of

from jaxserve.config import ServerConfig
from tests.server.conftest import Client

KEY = {"Authorization": "Bearer k"}


@pytest.fixture
def client(engine, tmp_path):
    (tmp_path / "keys").write_text("k\n")
    engine.profiles = []

    async def profile(folder, seconds):
        engine.profiles.append((folder, seconds))
        folder.mkdir()

    engine.profile = profile
    settings = {"api_keys_file": str(tmp_path / "keys"), "profile_dir": str(tmp_path / "traces")}
    return Client(engine, **settings)


def test_holders_of_keys_may_have_a_trace(client, engine, tmp_path):
    answer = client.post("/debug/profile", {"seconds": 0.5}, headers=KEY).json()
    assert engine.profiles == [(tmp_path / "traces" / answer["name"], 0.5)]
    assert client.post("/debug/profile", {}).status_code == 401
    assert len(engine.profiles) == 1


def test_there_is_no_such_route_unless_asked_for(engine):
    error_of(Client(engine).post("/debug/profile", {}), 404)
    with pytest.raises(ValueError, match="--api_keys_file"):
        ServerConfig(profile_dir="x").validate()


@pytest.mark.parametrize("seconds", [0, -1, 31, "3", 1e999])
def test_traces_are_short(client, engine, seconds):
    body = '{"seconds": 1e999}' if seconds == 1e999 else None
    json = None if body else {"seconds": seconds}
    error_of(client.post("/debug/profile", json, content=body, headers=KEY))
    assert engine.profiles == []


def test_traces_are_few_and_one_at_a_time(client, engine, tmp_path):
    service = client.app.state.service
    asyncio.run(service.profiling.acquire())
    assert error_of(client.post("/debug/profile", {}, headers=KEY), 409)["code"] == "busy"
    service.profiling.release()
    for number in range(16):
        (tmp_path / "traces" / str(number)).mkdir(parents=True)
    error = error_of(client.post("/debug/profile", {}, headers=KEY), 409)
    assert error["code"] == "too_many_profiles" and engine.profiles == []
