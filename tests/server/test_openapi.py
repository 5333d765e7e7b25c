"""The OpenAPI document, and requests made up from it: nothing valid or broken may give a 5xx."""

import pytest
from fake_engine import FakeEngine

from tests.server.conftest import Client

schemathesis = pytest.importorskip("schemathesis")
import hypothesis  # noqa: E402
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

CLIENT = Client(FakeEngine())
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", CLIENT.app)


@SCHEMA.parametrize()
@hypothesis.settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    # The explicit phase tries each boundary of each field: minutes, for a run by hand.
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_generated_requests(case):
    response = case.call()
    assert response.status_code < 500, response.text
    # Not every value of the right type is acceptable: prompts can be empty, fields can disagree.
    case.validate_response(response, excluded_checks=[positive_data_acceptance])


def test_document_describes_bodies_and_errors():
    document = CLIENT.get("/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["required"]
    assert {"400", "401", "413", "429", "503"} <= set(chat["responses"])
    assert "ChatRequest" in document["components"]["schemas"]
