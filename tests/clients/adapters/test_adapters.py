"""Agent frameworks that convert the server's tools: the converted schemas, and a call."""

import json
import os
from pathlib import Path

import anyio
import pytest

SERVER = os.environ["SBCL_MCP_BIN"]
TOOLS = {tool["name"]: tool for tool in json.loads((Path(__file__).parents[1] / "tools.json").read_text())}
FAILURE = {"code": "(car 1)"}


@pytest.fixture
def anyio_backend():
    return "asyncio"


pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Makes the server write to directories of the test."""
    for name in ["HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "XDG_DATA_HOME", "TMPDIR"]:
        directory = tmp_path / name
        directory.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(directory))


def assert_matches_tools_json(schemas):
    """Asserts that all tools are listed with their arguments, the types, and the required arguments."""
    assert list(schemas) == list(TOOLS)
    for name, schema in schemas.items():
        expected = TOOLS[name]
        properties = {argument: one_type(schema["properties"][argument]) for argument in schema["properties"]}
        assert properties == expected["arguments"], name
        assert set(schema.get("required") or []) == set(expected["required"]), name


def one_type(schema):
    """Returns the type of an argument; frameworks add null to the types of optional arguments."""
    types = schema.get("type") or [each["type"] for each in schema["anyOf"]]
    types = [types] if isinstance(types, str) else types
    [name] = [str(each).lower() for each in types if str(each).lower() != "null"]
    return name


async def test_openai_agents_converts_and_calls_the_tools():
    from agents.mcp import MCPServerStdio
    from agents.mcp.util import MCPUtil

    with anyio.fail_after(120):
        async with MCPServerStdio(params={"command": SERVER, "args": ["serve"], "env": dict(os.environ)}) as server:
            tools = await server.list_tools()
            plain = [MCPUtil.to_function_tool(tool, server, convert_schemas_to_strict=False) for tool in tools]
            assert_matches_tools_json({tool.name: tool.params_json_schema for tool in plain})
            strict = [MCPUtil.to_function_tool(tool, server, convert_schemas_to_strict=True) for tool in tools]
            # A schema without properties counts as one that permits any property, so it is not strict.
            loose = [tool.name for tool in strict if not tool.strict_json_schema]
            assert loose == [name for name, tool in TOOLS.items() if not tool["arguments"]]
            result = await server.call_tool("evaluate-lisp", {"code": "(+ 1 2)"})
            assert (result.content[0].text, result.isError) == ("=> 3", False)
            result = await server.call_tool("evaluate-lisp", FAILURE)
            assert result.isError and "[ERROR] TYPE-ERROR" in result.content[0].text


async def test_langchain_converts_and_calls_the_tools():
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from langchain_mcp_adapters.client import MultiServerMCPClient
    from langchain_mcp_adapters.tools import load_mcp_tools

    with anyio.fail_after(120):
        server = {"command": SERVER, "args": ["serve"], "transport": "stdio", "env": dict(os.environ)}
        async with MultiServerMCPClient({"sbcl": server}).session("sbcl") as session:
            tools = await load_mcp_tools(session)
            functions = [convert_to_openai_tool(tool)["function"] for tool in tools]
            assert_matches_tools_json({function["name"]: function["parameters"] for function in functions})
            [block] = await tools[0].ainvoke({"code": "(+ 1 2)"})
            assert block["text"] == "=> 3"


async def test_pydantic_ai_converts_and_calls_the_tools():
    from fastmcp.client import Client
    from fastmcp.client.transports import StdioTransport
    from pydantic_ai import Agent, ModelRetry
    from pydantic_ai.mcp import MCPToolset
    from pydantic_ai.models.test import TestModel
    from pydantic_ai.profiles.google import GoogleJsonSchemaTransformer
    from pydantic_ai.profiles.openai import OpenAIJsonSchemaTransformer

    with anyio.fail_after(120):
        transport = StdioTransport(SERVER, ["serve"], env=dict(os.environ), keep_alive=False)
        async with MCPToolset(Client(transport)) as toolset:
            # This model calls the tools with arguments that fit their schemas.
            model = TestModel(call_tools=["describe-symbol", "list-definitions", "check-evaluation"])
            agent = Agent(model, toolsets=[toolset])
            answers = json.loads((await agent.run("Look.")).output)
            assert set(answers) == {"describe-symbol", "list-definitions", "check-evaluation"}
            tools = model.last_model_request_parameters.function_tools
            for transformer in [OpenAIJsonSchemaTransformer, GoogleJsonSchemaTransformer]:
                schemas = {tool.name: transformer(tool.parameters_json_schema, strict=False).walk() for tool in tools}
                assert_matches_tools_json(schemas)
            assert await toolset.direct_call_tool("evaluate-lisp", {"code": "(+ 1 2)"}) == "=> 3"
            with pytest.raises(ModelRetry, match="TYPE-ERROR"):
                await toolset.direct_call_tool("evaluate-lisp", FAILURE)


async def test_autogen_converts_and_calls_the_tools():
    from autogen_core import CancellationToken
    from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams, mcp_server_tools

    with anyio.fail_after(120):
        params = StdioServerParams(command=SERVER, args=["serve"], env=dict(os.environ))
        async with McpWorkbench(params) as workbench:
            tools = await workbench.list_tools()
            assert_matches_tools_json({tool["name"]: tool["parameters"] for tool in tools})
            result = await workbench.call_tool("evaluate-lisp", {"code": "(+ 1 2)"}, CancellationToken())
            assert (result.to_text(), result.is_error) == ("=> 3", False)
        # A tool adapter makes a model of its arguments from the schema.
        adapters = await mcp_server_tools(params)
        assert [adapter.name for adapter in adapters] == list(TOOLS)
        for adapter in adapters:
            fields = {field.alias or name for name, field in adapter.args_type().model_fields.items()}
            assert fields == set(TOOLS[adapter.name]["arguments"]), adapter.name


async def test_google_genai_converts_the_tools():
    from google.genai import _mcp_utils
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    with anyio.fail_after(120):
        params = StdioServerParameters(command=SERVER, args=["serve"], env=dict(os.environ))
        async with stdio_client(params) as streams, ClientSession(*streams) as session:
            await session.initialize()
            tools = _mcp_utils.mcp_to_gemini_tools((await session.list_tools()).tools)
            declarations = [declaration for tool in tools for declaration in tool.function_declarations]
            schemas = {each.name: each.parameters.to_json_dict() for each in declarations}
            for schema in schemas.values():
                schema.setdefault("properties", {})
                for argument in schema["properties"].values():
                    argument["type"] = argument["type"].removeprefix("Type.")
            assert_matches_tools_json(schemas)
