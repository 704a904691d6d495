"""Runs the calls of conversations.json and checks the answers: see ../README.md."""

import json
import re
from pathlib import Path

import anyio
import pytest

from server import RpcError, serve

HERE = Path(__file__).parent
CONVERSATIONS = json.loads((HERE.parent / "conversations.json").read_text(encoding="utf-8"))
PLACEHOLDERS = {"{time}": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "{number}": r"\d+"}

pytestmark = pytest.mark.anyio


def assert_text(expected, text):
    pieces = re.split(r"(\{time\}|\{number\})", expected)
    pattern = "".join(PLACEHOLDERS.get(piece) or re.escape(piece) for piece in pieces)
    # The comparison as text makes pytest show where they differ.
    assert re.fullmatch(pattern, text) or text == expected


async def check_call(server, call, before):
    if "rpc-error" in call:
        with pytest.raises(RpcError) as refusal:
            await server.call(call["tool"], call["arguments"])
        assert refusal.value.error.code == call["rpc-error"]
        return None
    text, is_error = await server.call(call["tool"], call["arguments"])
    assert is_error == call.get("error", False), text
    if "text" in call:
        assert_text("\n".join(call["text"]), text)
    if "starts" in call:
        beginning = "\n".join(call["starts"])
        assert text[: len(beginning)] == beginning
    for part in call.get("contains", []):
        assert part in text
    if call.get("same"):
        assert text == before
    return text


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation["name"])
async def test_conversation(conversation, mode):
    with anyio.fail_after(120):
        async with serve(mode) as server:
            before = None
            for call in conversation["calls"]:
                before = await check_call(server, call, before)
