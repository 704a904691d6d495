"""Runs the server behind either major version of the SDK. Results are plain JSON, the same for 1.x and 2.x."""

import os
import tempfile
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.shared import exceptions

MAJOR = int(version("mcp").split(".")[0])
BINARY = os.path.abspath(os.environ["SBCL_MCP_BIN"])

# The ways to open a session. 2.x also supports the revision without a handshake: discovered first, or assumed.
MODES = ["handshake"] if MAJOR == 1 else ["handshake", "discovered", "unannounced"]

RpcError = exceptions.McpError if MAJOR == 1 else exceptions.MCPError

# The SDKs do not report the server's exit status, so a shell records it.
RECORD_STATUS = 'status=$1; shift; "$@"; echo $? >"$status"'


def plain(model):
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


@dataclass
class Server:
    mode: str
    client: object
    info: dict = field(default_factory=dict)

    @property
    def modern(self):
        return self.mode != "handshake"

    async def tools(self):
        return plain(await self.client.list_tools())["tools"]

    async def call(self, tool, arguments, on_progress=None):
        """Calls a tool; returns the text of the only content block and whether it is an error."""
        result = plain(await self.client.call_tool(tool, arguments, progress_callback=on_progress))
        (block,) = result["content"]
        assert block["type"] == "text", block
        return block["text"], result.get("isError", False)

    async def evaluate(self, code, **arguments):
        text, is_error = await self.call("evaluate-lisp", {"code": code, **arguments})
        assert not is_error, text
        return text

    def next_request(self):
        """Returns the id of the next request, for 1.x, which leaves cancellation to its user."""
        return self.client._request_id

    async def cancel(self, request):
        params = types.CancelledNotificationParams(requestId=request)
        notification = types.CancelledNotification(method="notifications/cancelled", params=params)
        await self.client.send_notification(types.ClientNotification(notification))


@asynccontextmanager
async def serve(mode, arguments=(), choose=None):
    """Runs a server during the block; then asserts that it exited with status 0 and sent nothing unexpected.

    `choose` answers the server's elicitations in place of the user.
    """
    stray = []

    async def received(message):
        # Progress has its own callback; the server sends no other notifications.
        stray.append(repr(message))

    with tempfile.TemporaryDirectory() as directory:
        status = Path(directory, "status")
        parameters = StdioServerParameters(command="sh", args=["-c", RECORD_STATUS, "sh", str(status), BINARY, *arguments])
        with open(Path(directory, "stderr"), "w+") as stderr:
            transport = stdio_client(parameters, errlog=stderr)
            with unwrapped_failure():
                async with (open_1 if MAJOR == 1 else open_2)(mode, transport, received, choose) as server:
                    yield server
            stderr.seek(0)
            # SBCL's runtime prints this line when a stack overflows.
            assert [line for line in stderr if not line.startswith("INFO: Control stack guard page")] == []
        # If the server exits too late, the SDK ends the shell before it can write.
        assert status.read_text() == "0\n"
        assert stray == []


@contextmanager
def unwrapped_failure():
    """Unwraps a failed assertion from the exception groups of the SDK, of which pytest shows little."""
    try:
        yield
    except BaseException as failure:
        while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
            failure = failure.exceptions[0]
        raise failure


@asynccontextmanager
async def open_1(mode, transport, received, choose):
    async def filtered(message):
        if not isinstance(getattr(message, "root", None), types.ProgressNotification):
            await received(message)

    async with (
        transport as (incoming, outgoing),
        ClientSession(incoming, outgoing, message_handler=filtered, elicitation_callback=choose) as client,
    ):
        yield Server(mode, client, plain(await client.initialize()))


@asynccontextmanager
async def open_2(mode, transport, received, choose):
    from mcp import Client

    async def filtered(message):
        if not isinstance(message, types.ProgressNotification):
            await received(message)

    sdk_mode = {"handshake": "legacy", "discovered": "auto", "unannounced": "2026-07-28"}[mode]
    async with Client(transport, mode=sdk_mode, message_handler=filtered, elicitation_callback=choose) as client:
        info = {
            "protocolVersion": client.protocol_version,
            "capabilities": plain(client.server_capabilities),
            "serverInfo": plain(client.server_info) if client.server_info else None,
            "instructions": client.instructions,
        }
        yield Server(mode, client, info)
