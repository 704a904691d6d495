// The official conformance suite: the scenarios that apply to this server. scenarios.json says why the others do not.
//
// The suite expects servers to implement its own tools ("test_simple_text" and so on). Where evaluate-lisp can do the
// same, a call of such a tool is replaced by a call of evaluate-lisp; the answer reaches the suite unchanged.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { after, before, test } from "node:test";
import { promisify } from "node:util";
import { readFile } from "node:fs/promises";

import { bridge } from "./bridge.js";
import { BINARY, program } from "./programs.js";

const run = promisify(execFile);
const SUITE = program("@modelcontextprotocol/conformance", "conformance");
const SCENARIOS = JSON.parse(await readFile(new URL("scenarios.json", import.meta.url), "utf8"));
const CALLS = new Map(Object.values(SCENARIOS.apply).filter(Boolean).map((call) => [call.tool, call.arguments]));

function withEvaluateLisp(message) {
  const known = message.method === "tools/call" && CALLS.get(message.params.name);
  return known ? { ...message, params: { ...message.params, name: "evaluate-lisp", arguments: known } } : message;
}

let server;
before(async () => (server = await bridge(BINARY, withEvaluateLisp)));
after(() => server.close());

test("every scenario of the suite is listed", async () => {
  const { stdout } = await run(process.execPath, [SUITE, "list", "--server"]);
  const names = [...stdout.matchAll(/^  - (\S+)/gm)].map((match) => match[1]);
  const listed = [...Object.keys(SCENARIOS.apply), ...Object.keys(SCENARIOS["do not apply"])];
  assert.deepEqual(listed.sort(), names.sort());
});

for (const scenario of Object.keys(SCENARIOS.apply)) {
  test(scenario, async () => {
    const { stdout } = await run(process.execPath, [SUITE, "server", "--url", server.url, "--scenario", scenario]);
    // At least one check ran, and none failed.
    assert.match(stdout, /^Passed: (\d+)\/\1, 0 failed, 0 warnings$/m);
    assert.doesNotMatch(stdout, /^Passed: 0/m);
  });
}
