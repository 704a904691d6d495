// The MCP Inspector's command line, whose strict mode finds schema keywords that clients' converters refuse.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { BINARY, program } from "./programs.js";

const INSPECTOR = program("@modelcontextprotocol/inspector", "mcp-inspector");

/** Runs the Inspector on a server with these arguments; returns its output and exit status. */
async function inspect(options, ...arguments_) {
  // The Inspector keeps a catalogue of servers in the home directory.
  const home = await mkdtemp(join(tmpdir(), "sbcl-mcp-inspector-"));
  try {
    return await new Promise((done) => {
      const command = [INSPECTOR, "--cli", ...options, "--", BINARY, ...arguments_];
      execFile(process.execPath, command, { env: { ...process.env, HOME: home } }, (error, stdout, stderr) =>
        done({ status: error ? error.code : 0, stdout, stderr }),
      );
    });
  } finally {
    await rm(home, { recursive: true, force: true });
  }
}

for (const arguments_ of [[], ["--structured-content"], ["--no-supervisor"]]) {
  test(`strict: tools/list ${arguments_}`, async () => {
    const { status, stdout, stderr } = await inspect(["--strict", "--method", "tools/list"], ...arguments_);
    assert.deepEqual({ status, stderr }, { status: 0, stderr: "" });
    assert.ok(JSON.parse(stdout).tools.some((tool) => tool.name === "evaluate-lisp"));
  });
}

const evaluate = (code) => ["--method", "tools/call", "--tool-name", "evaluate-lisp", "--tool-arg", `code=${code}`];

test("tools/call prints the result", async () => {
  const { status, stdout, stderr } = await inspect(evaluate("(+ 1 2)"));
  assert.deepEqual({ status, stderr }, { status: 0, stderr: "" });
  assert.deepEqual(JSON.parse(stdout), { content: [{ type: "text", text: "=> 3" }], isError: false });
});

test("a failing tools/call exits with a status other than 0", async () => {
  const { status, stdout } = await inspect(evaluate("(car 1)"));
  assert.notEqual(status, 0);
  assert.match(JSON.parse(stdout).content[0].text, /^\[ERROR\] TYPE-ERROR\n/);
});
