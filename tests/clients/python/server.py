"""The server behind one line of the SDK. Whatever comes back is plain JSON, the same for 1.x and 2.x."""

import os
import tempfile
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.shared import exceptions

LINE = int(version("mcp").split(".")[0])
BINARY = os.path.abspath(os.environ["SBCL_MCP_BIN"])

# How to open a session. 2.x also speaks the revision that has no handshake: asked for first, or spoken unannounced.
MODES = ["handshake"] if LINE == 1 else ["handshake", "discovered", "unannounced"]

RpcError = exceptions.McpError if LINE == 1 else exceptions.MCPError

# The SDKs do not tell how their server ended, so a shell in between notes it.
NOTE_STATUS = 'status=$1; shift; "$@"; echo $? >"$status"'


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
        """The text of the one block of the answer, and whether it is an error."""
        result = plain(await self.client.call_tool(tool, arguments, progress_callback=on_progress))
        (block,) = result["content"]
        assert block["type"] == "text", block
        return block["text"], result.get("isError", False)

    async def evaluate(self, code, **arguments):
        text, is_error = await self.call("evaluate-lisp", {"code": code, **arguments})
        assert not is_error, text
        return text

    def next_request(self):
        """The id that the next request will have, where the SDK leaves cancelling to its user."""
        return self.client._request_id

    async def cancel(self, request):
        params = types.CancelledNotificationParams(requestId=request)
        notification = types.CancelledNotification(method="notifications/cancelled", params=params)
        await self.client.send_notification(types.ClientNotification(notification))


@asynccontextmanager
async def serve(mode, arguments=(), choose=None):
    """A server for as long as the block lasts; afterwards it must have ended well, and said nothing stray.

    `choose` answers in place of the user what the server asks.
    """
    stray = []

    async def received(message):
        # Progress has its own callback; nothing else is announced by this server.
        stray.append(repr(message))

    with tempfile.TemporaryDirectory() as directory:
        status = Path(directory, "status")
        parameters = StdioServerParameters(command="sh", args=["-c", NOTE_STATUS, "sh", str(status), BINARY, *arguments])
        with open(Path(directory, "stderr"), "w+") as stderr:
            transport = stdio_client(parameters, errlog=stderr)
            with one_failure():
                async with (opened_1 if LINE == 1 else opened_2)(mode, transport, received, choose) as server:
                    yield server
            stderr.seek(0)
            # SBCL's own runtime says it when a stack overflows.
            assert [line for line in stderr if not line.startswith("INFO: Control stack guard page")] == []
        # Too late, and the SDK would have ended the shell before it could write.
        assert status.read_text() == "0\n"
        assert stray == []


@contextmanager
def one_failure():
    """The SDKs' task groups wrap a failed assertion, and pytest then shows little of it."""
    try:
        yield
    except BaseException as failure:
        while isinstance(failure, BaseExceptionGroup) and len(failure.exceptions) == 1:
            failure = failure.exceptions[0]
        raise failure


@asynccontextmanager
async def opened_1(mode, transport, received, choose):
    async def filtered(message):
        if not isinstance(getattr(message, "root", None), types.ProgressNotification):
            await received(message)

    async with (
        transport as (incoming, outgoing),
        ClientSession(incoming, outgoing, message_handler=filtered, elicitation_callback=choose) as client,
    ):
        yield Server(mode, client, plain(await client.initialize()))


@asynccontextmanager
async def opened_2(mode, transport, received, choose):
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
