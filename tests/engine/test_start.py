"""From settings to a running engine: what a start says about files that it cannot use."""

import jax
import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine import start


@pytest.fixture(autouse=True)
def settings():
    """What a start sets for the whole process, as it was."""
    names = [name for name in jax.config.values if "cache" in name]
    before = {name: jax.config.values[name] for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_that_cannot_be_kept_where_the_settings_say_are_an_error(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match="file"):
        start.use_compile_cache(EngineConfig(compile_cache=str(file)), tmp_path)


def test_programs_that_cannot_be_kept_in_the_users_folder_are_made_again(tmp_path, caplog):
    file = tmp_path / "file"
    file.touch()
    start.use_compile_cache(EngineConfig(), file)
    assert "the next start compiles again" in caplog.text and str(file) in caplog.text
    caplog.clear()
    start.use_compile_cache(EngineConfig(), tmp_path / "new")
    assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path / "new" / "programs"))
    assert not caplog.text
