// Runs the server behind either major version of the SDK, with one interface for 1.x and 2.x.

import assert from "node:assert/strict";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

import { Client as Client1 } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport as Transport1 } from "@modelcontextprotocol/sdk/client/stdio.js";
import { Client as Client2 } from "@modelcontextprotocol/client";
import { StdioClientTransport as Transport2 } from "@modelcontextprotocol/client/stdio";

assert.ok(process.env.SBCL_MCP_BIN, "SBCL_MCP_BIN names the binary");
const BINARY = resolve(process.env.SBCL_MCP_BIN);
const NAME = { name: "end-to-end", version: "1" };

/** Major versions of the SDK, and ways to open a session. The revision 2026-07-28 has no handshake. */
export const MODES = [
  { name: "1.x", modern: false, client: () => new Client1(NAME), Transport: Transport1 },
  { name: "2.x, handshake", modern: false, client: () => new Client2(NAME), Transport: Transport2 },
  { name: "2.x, 2026-07-28", modern: true, client: () => new Client2(NAME, pinned), Transport: Transport2 },
];
const pinned = { versionNegotiation: { mode: { pin: "2026-07-28" } } };

export const NO_ERROR =
  "No error information available.\n(No error has occurred since the last successful evaluation)";

// The SDKs do not report the server's exit status, so a shell records it.
const RECORD_STATUS = '"$1"; echo $? >>"$2"';

/** Runs `talk` with a server; then asserts that it exited with status 0 and sent nothing unexpected. */
export async function serve(mode, talk) {
  const directory = await mkdtemp(join(tmpdir(), "sbcl-mcp-"));
  try {
    const status = join(directory, "status");
    const transport = new mode.Transport({
      command: "sh",
      args: ["-c", RECORD_STATUS, "sh", BINARY, status],
      stderr: "pipe",
    });
    let stderr = "";
    transport.stderr.on("data", (chunk) => (stderr += chunk));
    const stray = [];
    const client = mode.client();
    // The SDK reports messages that it could not read or did not expect.
    client.onerror = (error) => stray.push(error);
    await client.connect(transport);
    try {
      await talk(new Server(mode, client), directory);
    } finally {
      await client.close();
    }
    // SBCL's runtime prints this line when a stack overflows.
    const printed = stderr.split("\n").filter((line) => line && !line.startsWith("INFO: Control stack guard page"));
    assert.deepEqual({ printed, stray }, { printed: [], stray: [] });
    // If the server exits too late, the SDK ends the shell before it can write.
    assert.match(await readFile(status, "utf8"), /^(0\n)+$/);
  } finally {
    await rm(directory, { recursive: true });
  }
}

class Server {
  constructor(mode, client) {
    this.mode = mode;
    this.client = client;
  }

  /** Calls a tool; returns the text of the only content block and whether it is an error. */
  async call(name, args, options) {
    const params = { name, arguments: args };
    const result = await (this.client instanceof Client1
      ? this.client.callTool(params, undefined, options)
      : this.client.callTool(params, options));
    assert.deepEqual(result.content.map((block) => block.type), ["text"]);
    return { text: result.content[0].text, isError: result.isError ?? false };
  }

  async evaluate(code, options) {
    const { text, isError } = await this.call("evaluate-lisp", { code, timeout: 600 }, options);
    assert.equal(isError, false, text);
    return text;
  }
}
