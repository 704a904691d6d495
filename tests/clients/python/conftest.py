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
def sdk_logs_no_warnings(caplog):
    """Fails the test if the SDK logged a warning: the SDKs log unreadable stdout and continue."""
    yield
    warnings = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert warnings == []
