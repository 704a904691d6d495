// The server behind one line of the SDK: the same face for 1.x and 2.x.

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

/** Lines of the SDK and ways to open a session. The revision of 2026-07-28 has no handshake. */
export const MODES = [
  { name: "1.x", modern: false, client: () => new Client1(NAME), Transport: Transport1 },
  { name: "2.x, handshake", modern: false, client: () => new Client2(NAME), Transport: Transport2 },
  { name: "2.x, 2026-07-28", modern: true, client: () => new Client2(NAME, pinned), Transport: Transport2 },
];
const pinned = { versionNegotiation: { mode: { pin: "2026-07-28" } } };

export const NO_ERROR =
  "No error information available.\n(No error has occurred since the last successful evaluation)";

// The SDKs do not tell how their server ended, so a shell in between notes it.
const NOTE_STATUS = '"$1"; echo $? >>"$2"';

/** Runs `talk` with a server, which must then have ended well and said nothing stray. */
export async function serve(mode, talk) {
  const directory = await mkdtemp(join(tmpdir(), "sbcl-mcp-"));
  try {
    const status = join(directory, "status");
    const transport = new mode.Transport({
      command: "sh",
      args: ["-c", NOTE_STATUS, "sh", BINARY, status],
      stderr: "pipe",
    });
    let stderr = "";
    transport.stderr.on("data", (chunk) => (stderr += chunk));
    const stray = [];
    const client = mode.client();
    // What the SDK could not read, or did not expect, on the server's stdout.
    client.onerror = (error) => stray.push(error);
    await client.connect(transport);
    try {
      await talk(new Server(mode, client), directory);
    } finally {
      await client.close();
    }
    // SBCL's own runtime says it when a stack overflows.
    const said = stderr.split("\n").filter((line) => line && !line.startsWith("INFO: Control stack guard page"));
    assert.deepEqual({ said, stray }, { said: [], stray: [] });
    // Too late, and the SDK would have ended the shell before it could write.
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

  /** The text of the one block of the answer, and whether it is an error. */
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
