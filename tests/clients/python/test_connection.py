"""Opening a session, listing tools, long answers, closing."""

import json
import re
from pathlib import Path

import anyio
import pytest

from server import MAJOR, RpcError, serve

TOOLS = json.loads((Path(__file__).parent.parent / "tools.json").read_text(encoding="utf-8"))

pytestmark = pytest.mark.anyio


async def test_server_reports_version_capabilities_and_instructions(mode):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            info = server.info
            assert info["protocolVersion"] == ("2026-07-28" if server.modern else "2025-11-25")
            # Without discovery, the client has no information about the server.
            if mode != "unannounced":
                assert info["serverInfo"]["name"] == "sbcl-mcp"
                assert info["serverInfo"]["version"]
                assert "tools" in info["capabilities"]
                assert "describe-last-error" in info["instructions"]
                # Some clients cut the instructions at this length.
                assert len(info["instructions"].encode()) <= 2000
            assert await server.evaluate("(+ 1 2)") == "=> 3"


async def test_tools_list_matches_tools_json(mode):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            tools = {tool["name"]: tool for tool in await server.tools()}
            assert set(tools) == {tool["name"] for tool in TOOLS}
            assert tools["evaluate-lisp"]["_meta"]["anthropic/alwaysLoad"] is True
            for expected in TOOLS:
                tool = tools[expected["name"]]
                schema = tool["inputSchema"]
                assert schema["type"] == "object"
                # Keywords that some clients' converters refuse.
                assert not re.search(r'"(anyOf|\$ref|additionalProperties)":', json.dumps(schema)), schema
                assert schema.get("required", []) == expected["required"]
                properties = schema.get("properties", {})
                assert {name: of["type"] for name, of in properties.items()} == expected["arguments"]
                assert all(of["description"] for of in properties.values())
                assert tool["description"]
                for hint in ["readOnlyHint", "destructiveHint"]:
                    if hint in expected:
                        assert tool["annotations"][hint] == expected[hint], (tool["name"], hint)


async def test_unknown_tools_are_refused_and_the_server_still_works(mode):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            for name in ["", "evaluate_lisp", "EVALUATE-LISP"]:
                with pytest.raises(RpcError) as refusal:
                    await server.call(name, {"code": "1"})
                assert refusal.value.error.code == -32602
            assert await server.evaluate("(+ 1 2)") == "=> 3"


async def test_long_answer_arrives_completely(mode):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            await server.call("configure-limits", {"max-answer": 1_000_000})
            text = await server.evaluate("(dotimes (i 20000) (format t \"line ~5,'0d λ~%\" i)) :done")
            lines = "\n".join(f"line {number:05} λ" for number in range(20000))
            assert text == f"[stdout]\n{lines}\n\n=> :DONE"


async def test_check_evaluation_shows_the_omitted_part_of_a_long_answer(mode):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            text = await server.evaluate("(dotimes (i 1000) (format t \"line ~5,'0d λ~%\" i)) :done")
            assert len(text) <= 9500
            marker = r"\[\.\.\. (\d+) characters omitted; check-evaluation (\{.*?\}) shows them\]"
            answer = re.fullmatch(rf"\[stdout\]\n(.*){marker}(.*)\n\n=> :DONE", text, re.DOTALL)
            head, count, call, tail = answer.groups()
            arguments = json.loads(call)
            assert arguments == {"id": 1, "part": "output", "from": len(head)}
            shown, is_error = await server.call("check-evaluation", {**arguments, "limit": int(count)})
            assert not is_error, shown
            title, _, page = shown.partition("\n")
            last = len(head) + int(count) - 1
            assert title == f"Evaluation 1, output, characters {len(head)} to {last} of 13000:"
            # A page ends with the marker of the next one.
            middle = re.fullmatch(f"(.*){marker}", page, re.DOTALL)[1]
            assert head + middle + tail == "\n".join(f"line {number:05} λ" for number in range(1000))


async def test_server_exits_with_the_client_while_threads_run(mode):
    with anyio.fail_after(60):
        async with serve(mode) as server:
            code = "(progn (sb-thread:make-thread (lambda () (loop))) (sb-thread:make-thread (lambda () (sleep 600))) :on)"
            assert (await server.evaluate(code)).endswith("=> :ON")


@pytest.mark.skipif(MAJOR == 1, reason="1.x itself fails when it is answered while it closes")
async def test_server_exits_with_the_client_and_answers_pending_calls(mode):
    refusals = []

    async def expect_refusal(server, code):
        with pytest.raises(RpcError) as refusal:
            await server.call("evaluate-lisp", {"code": code, "timeout": 600})
        refusals.append(refusal.value)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            async with serve(mode) as server:
                tasks.start_soon(expect_refusal, server, "(loop)")
                tasks.start_soon(expect_refusal, server, "(sleep 600)")
                # Both calls have been sent when this is answered.
                await anyio.sleep(0)
                await server.tools()
    assert len(refusals) == 2
