import logging

import pytest

from server import MODES


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture(autouse=True)
def sdk_has_no_complaints(caplog):
    """The SDKs log what they cannot read on the server's stdout, and go on."""
    yield
    complaints = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert complaints == []
