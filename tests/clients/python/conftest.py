import logging

import mcp.client.session
import mcp.client.stdio
import pytest

from server import MODES


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


@pytest.fixture(autouse=True)
def patient_sdk(monkeypatch):
    """Raises the SDK's time limits for the start and the end of a server, which a busy machine exceeds."""
    monkeypatch.setattr(mcp.client.stdio, "PROCESS_TERMINATION_TIMEOUT", 30)
    if hasattr(mcp.client.session, "DISCOVER_TIMEOUT_SECONDS"):
        monkeypatch.setattr(mcp.client.session, "DISCOVER_TIMEOUT_SECONDS", 30)


@pytest.fixture(autouse=True)
def sdk_logs_no_warnings(caplog):
    """Fails the test if the SDK logged a warning: the SDKs log unreadable stdout and continue."""
    yield
    warnings = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert warnings == []
