import pytest

from tests.conftest import DATA


@pytest.fixture(scope="session")
def tiny_model():
    """Folder of a random llama of 4 layers, 384 ids, llama3 rope."""
    return DATA / "models" / "llama_llama3"
