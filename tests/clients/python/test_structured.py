"""Structured content, which the SDK itself validates against the schemas."""

import anyio
import pytest

from server import plain, serve

pytestmark = pytest.mark.anyio

PAGE = {"evaluation": 1, "part": "output", "text": "x\n", "from": 0, "total": 2, "omitted": 0}


async def test_structured_content_fits_its_schemas(mode):
    with anyio.fail_after(60):
        async with serve(mode, ["--structured-content"]) as server:
            assert all(tool["outputSchema"]["type"] == "object" for tool in await server.tools())
            for tool, arguments, part in [
                ("evaluate-lisp", {"code": "(format t \"x~%\") (values 1 2)"}, {"stdout": "x\n", "values": ["1", "2"]}),
                ("check-evaluation", {}, {}),
                ("check-evaluation", {"wait": 25}, {"stdout": "x\n", "values": ["1", "2"]}),
                ("check-evaluation", {"part": "output"}, {"page": PAGE}),
                ("check-evaluation", {"id": 9}, {"refused": "There is no evaluation 9: the newest is 1."}),
                ("evaluate-lisp", {"code": "(error \"x\")", "on-error": "debug"}, {"held": True}),
                ("describe-last-error", {}, {}),
                ("get-backtrace", {"locals": True}, {}),
                ("describe-last-error", {"list": 20}, {}),
                ("eval-in-frame", {"frame": 0, "code": "1"}, {"values": ["1"]}),
                ("get-backtrace", {"from": 0, "max-frames": 1, "locals": True}, {"live": True}),
                ("abort-evaluation", {}, {"aborted": True}),
                ("resume-from-frame", {"frame": 0}, {}),
                ("list-definitions", {}, {"definitions": []}),
                ("describe-symbol", {"name": "car"}, {}),
                ("configure-limits", {}, {"timeout": 30, "maxOutput": 1_000_000, "maxAnswer": 9500, "onError": "abort"}),
                ("reset-session", {}, {"reset": True}),
            ]:
                result = plain(await server.client.call_tool(tool, arguments))
                content = result["structuredContent"]
                assert {name: content[name] for name in part} == part, (tool, content)
                assert result["content"][0]["text"]
