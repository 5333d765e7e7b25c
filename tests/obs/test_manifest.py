"""What a run is made of: at the head of its log, and without file names for clients."""

import platform

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.obs.decision_log import RecordingScheduler, read, replay
from jaxserve.obs.manifest import for_clients, machine, manifest, versions
from tests.scheduler_driver import Driver


def made_of():
    return manifest(
        EngineConfig(model="/models/m.gguf", decision_log="/logs/x", num_slots=7),
        SchedulerConfig(policy="vtc"),
        model="m",
        weights={"sha256_of_samples": "ab", "dtype": "int8", "bytes": 5},
        tokenizer="cd",
        devices={"platform": "cpu", "device": "cpu", "devices": 1},
    )


def test_it_names_everything_that_matters():
    found = made_of()
    assert found["versions"].keys() >= {
        "python",
        "jaxserve",
        "jax",
        "jaxlib",
        "numpy",
        "tokenizers",
    }
    assert found["versions"]["python"] == platform.python_version()
    assert found["weights"]["sha256_of_samples"] == "ab"
    assert found["tokenizer"] == {"sha256_of_table": "cd"}
    assert found["config"]["num_slots"] == 7 and found["scheduling"]["policy"] == "vtc"
    assert found["hardware"]["cores"] >= 1 and found["hardware"]["devices"] == 1
    assert machine().keys() <= found["hardware"].keys() and versions() == found["versions"]


def test_clients_see_no_file_names():
    shown = for_clients(made_of())
    assert "/models" not in repr(shown) and "/logs" not in repr(shown)
    assert shown["model"] == "m" and shown["config"]["num_slots"] == 7
    assert for_clients({}) == {}


def test_a_log_begins_with_it(tmp_path):
    driver = Driver(wrap=lambda s: RecordingScheduler(s, tmp_path / "log", made_of()))
    driver.send([1, 2, 3])
    driver.run()
    driver.scheduler.close()
    assert next(read(tmp_path / "log"))["manifest"] == made_of()
    assert replay(tmp_path / "log").differs is None
