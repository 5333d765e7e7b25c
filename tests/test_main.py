"""The command line: flags from fields, presets, and errors in one line."""

import dataclasses
import gc
import os
import pathlib
import subprocess
import sys
import tomllib
import types

import pytest

from jaxserve import config, main, verbs
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.progress import Progress
from jaxserve.types import EngineFailed, OutputDelta, RequestRefused

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"


def parse(verb, *arguments):
    return main.parse(main.VERBS[verb], list(arguments))


def test_every_field_is_a_flag_with_its_default():
    (engine, _, server), rest = parse("serve")
    assert (engine, server, rest) == (EngineConfig(), ServerConfig(), [])


def test_flags_set_fields_by_type():
    (engine, _, server), _ = parse(
        "serve", "--model=x.gguf", "--num_slots=4", "--nopipelined", "--kv_memory_gib=0.5",
        "--port=0", "--batching=static",
    )  # fmt: skip
    assert engine == EngineConfig(
        model="x.gguf", num_slots=4, pipelined=False, kv_memory_gib=0.5, batching="static"
    )
    assert server.port == 0


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.stem)
def test_presets_are_valid_and_headed_by_their_command(path):
    first = path.read_text().splitlines()[0]
    assert first == f"# jaxserve serve --config={path.stem}"
    (engine, _, _), _ = parse("serve", f"--config={path.stem}")
    for name, value in tomllib.loads(path.read_text()).items():
        assert getattr(engine, name) == value


def test_flags_win_over_a_preset():
    (engine, _, _), _ = parse("serve", "--config=llama-3.1-8b-v6e", "--num_slots=8")
    assert (engine.num_slots, engine.page_size) == (8, 128)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--config=none"], "--config=none: there is no such preset"),
        (["serve", "--config=../setup"], "no such preset"),
        (["serve", "--num_slots=0"], "--num_slots=0: must be at least 1"),
        (["serve", "--num_slots=64", "--token_budget=8"], "raise the budget or lower the slots"),
        (["serve", "--host="], "--host is empty"),
        (["serve", "--port=65536"], "--port=65536: must be at most 65535"),
        (["serve", "--kv_memory_gib=nan"], "--kv_memory_gib=nan: must be at least 0"),
        (["serve", "--itl_target_ms=nan"], "--itl_target_ms=nan: must be at least 0.001"),
        (["bench", "offline", "--request_rate=nan"], "--request_rate=nan: must be above 0"),
        (["simulate", "--rate=nan"], "--rate=nan: must be at least 1e-06"),
        (["serve", "--page_size=48"], "must be a power of two"),
        (["serve", "--weight_dtype=int3"], "int3"),
        (["serve", "--num_slots=many"], "num_slots"),
        (["serve", "model.gguf"], "settings are flags"),
        (["serve", "--model=/no/such/file.gguf", "--port=0"], "no such file"),
        (["sreve"], "unknown verb 'sreve'"),
    ],
)
def test_errors_are_one_line_with_the_remedy(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxserve", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("jaxserve: ") and says in " ".join(error.split())
    assert "Traceback" not in error


HERE = pathlib.Path(__file__)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["batch", "no/in.jsonl", "out.jsonl"], "No such file or directory: 'no/in.jsonl'"),
        (["batch", str(HERE), "out.jsonl"], f"{HERE.name}:1 is not JSON"),
        (["batch", os.devnull, "no/out.jsonl"], "No such file or directory: 'no/out.jsonl'"),
        (["batch", os.devnull, "."], "Is a directory: '.'"),
        (["serve", "--api_keys_file=no/keys"], "No such file or directory: 'no/keys'"),
        (["serve", f"--api_keys_file={os.devnull}"], "has no keys"),
        (["serve", f"--shadow_cost_model={HERE}"], "is not a cost model"),
        (["serve", f"--api_keys_file={HERE}", f"--profile_dir={HERE}"], "File exists"),
        (["serve", "--host=no.such.host.invalid"], "give --host an address of this"),
        (["generate", "--decision_log=no/log", "x"], "No such file or directory: 'no/log'"),
        (["chat", "--chat_template=no/t.jinja"], "No such file or directory: 'no/t.jinja'"),
        (["simulate", "--plot=no/plot.png"], "No such file or directory: 'no/plot.png'"),
        (["calibrate", os.devnull, "--cost_model=no/c.json"], "directory: 'no/c.json'"),
    ],
)
def test_files_that_will_not_do_are_told_before_anything_is_loaded(
    arguments, says, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(sys, "argv", ["jaxserve", *arguments])
    monkeypatch.setattr(verbs, "_build", lambda *_: pytest.fail("loads first"))
    monkeypatch.setattr(verbs, "_load", lambda *_: pytest.fail("loads first"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("jaxserve: ") and error.count("\n") == 1 and says in error
    assert not list(tmp_path.iterdir())


def test_looking_at_a_path_changes_nothing_there(tmp_path):
    full, pipe = tmp_path / "full", tmp_path / "pipe"
    full.write_text("kept")
    os.mkfifo(pipe)
    for use in ("read", "write"):
        config.check_path(str(full), use)
        config.check_path(str(pipe), use)
    config.check_path(str(tmp_path / "new"), "write")
    assert full.read_text() == "kept" and sorted(tmp_path.iterdir()) == [full, pipe]
    folder = tmp_path / "a" / "b"
    config.check_path(str(folder), "folder")
    assert folder.is_dir() and not list(folder.iterdir())


def test_a_failed_engine_is_one_line(monkeypatch, capsys):
    def fail(_):
        raise EngineFailed("the engine thread failed: RuntimeError: no memory")

    monkeypatch.setattr(main, "main", fail)
    with pytest.raises(SystemExit) as ended:
        main.run()
    assert ended.value.code == 1
    assert (
        capsys.readouterr().err == "jaxserve: the engine thread failed: RuntimeError: no memory\n"
    )


@pytest.mark.parametrize("verb", list(main.VERBS))
def test_help_of_every_verb_names_every_flag(verb, capsys):
    assert main.main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    for kind in main.VERBS[verb].configs:
        for field in dataclasses.fields(kind):
            assert f"--{field.name}" in shown and field.metadata["help"]


def test_without_a_home_folder_the_remedy_is_told(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    with pytest.raises(ValueError, match="set HOME or XDG_CACHE_HOME"):
        main.cache_dir()


def test_a_chat_outlives_an_interrupted_answer_and_a_refused_message(monkeypatch, capsys):
    seen = []

    def stream(messages, params):
        seen.append([message["content"] for message in messages])
        yield OutputDelta(0, text="well", token_ids=[1])
        if messages[-1]["content"] == "interrupt":
            raise KeyboardInterrupt
        if messages[-1]["content"] == "refuse":
            raise RequestRefused("too long")

    tokenizer = types.SimpleNamespace(encode_chat=list)
    engine = types.SimpleNamespace(description="a model")
    llm = types.SimpleNamespace(engine=engine, tokenizer=tokenizer, stream=stream)
    monkeypatch.setattr(verbs, "_load", lambda *_: llm)
    lines = iter(["interrupt", "refuse", "again", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert verbs.chat(None, None, verbs.SamplingConfig(), None, None) == 0
    assert seen[-1] == ["interrupt", "well", "again"]
    assert "too long" in capsys.readouterr().err


def test_help_does_not_load_jax():
    """Help and flag errors come at once: jax takes a second to import."""
    code = "from jaxserve import main, sys; main.main(['--help']); assert 'jax' not in sys.modules"
    code = f"import sys; sys.argv=['jaxserve']; {code.replace('main, sys', 'main')}"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def engine_in(state, wait=lambda: None):
    return types.SimpleNamespace(
        wait_until_ready=wait, model_name="m", description="runs", memory_table="table",
        health=lambda: types.SimpleNamespace(state=state),
    )  # fmt: skip


def test_a_server_that_ends_before_it_is_ready_says_nothing_of_it(capsys):
    def ended():
        raise EngineFailed("the engine has shut down")

    for engine in (engine_in("draining"), engine_in("stopped", ended)):
        verbs._greet(engine, "http://here", Progress(), 0.0)
    assert capsys.readouterr().out == ""


def test_a_ready_server_is_not_searched_for_garbage(capsys):
    engine = engine_in("ready")
    try:
        verbs._greet(engine, "http://here", Progress(), 0.0)
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
    assert "http://here/v1/chat/completions" in capsys.readouterr().out
