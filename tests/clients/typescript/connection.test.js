// Opening, listing, closing.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { describe, it } from "node:test";

import { MODES, serve } from "./server.js";

const TOOLS = JSON.parse(await readFile(new URL("../tools.json", import.meta.url), "utf8"));

for (const mode of MODES) {
  describe(mode.name, () => {
    it("introduces itself", () =>
      serve(mode, async (server) => {
        const { client } = server;
        assert.equal(client.getServerVersion().name, "sbcl-mcp");
        assert.ok(client.getServerVersion().version);
        assert.ok(client.getServerCapabilities().tools);
        assert.match(client.getInstructions(), /describe-last-error/);
        if (client.getNegotiatedProtocolVersion) {
          assert.equal(client.getNegotiatedProtocolVersion(), mode.modern ? "2026-07-28" : "2025-11-25");
        }
        assert.equal(await server.evaluate("(+ 1 2)"), "=> 3");
      }));

    it("lists its tools", () =>
      serve(mode, async (server) => {
        const { tools } = await server.client.listTools();
        for (const expected of TOOLS) {
          const tool = tools.find((candidate) => candidate.name === expected.name);
          assert.ok(tool, expected.name);
          assert.ok(tool.description);
          const { type, properties = {}, required = [] } = tool.inputSchema;
          assert.equal(type, "object");
          assert.deepEqual([...required], expected.required);
          const types = Object.entries(properties).map(([name, of]) => [name, of.type]);
          assert.deepEqual(Object.fromEntries(types), expected.arguments);
          assert.ok(Object.values(properties).every((of) => of.description));
          for (const hint of ["readOnlyHint", "destructiveHint"]) {
            if (hint in expected) assert.equal(tool.annotations[hint], expected[hint], `${tool.name} ${hint}`);
          }
        }
      }));

    it("refuses unknown tools and goes on", () =>
      serve(mode, async (server) => {
        for (const name of ["", "evaluate_lisp", "EVALUATE-LISP"]) {
          await assert.rejects(server.call(name, { code: "1" }), { code: -32602 });
        }
        assert.equal(await server.evaluate("(+ 1 2)"), "=> 3");
      }));

    it("sends long answers whole", () =>
      serve(mode, async (server) => {
        await server.call("configure-limits", { "max-output": 1_000_000 });
        const text = await server.evaluate("(dotimes (i 20000) (format t \"line ~5,'0d λ~%\" i)) :done");
        const lines = Array.from({ length: 20000 }, (_, number) => `line ${String(number).padStart(5, "0")} λ`);
        assert.equal(text, `[stdout]\n${lines.join("\n")}\n\n=> :DONE`);
      }));

    it("leaves when the client does, whatever runs and whoever waits", async () => {
      const refusals = [];
      await serve(mode, async (server) => {
        for (const code of ["(loop)", "(sleep 600)"]) {
          refusals.push(assert.rejects(server.evaluate(code)));
        }
        // Both have been sent when this is answered.
        await server.client.listTools();
      });
      await Promise.all(refusals);
    });
  });
}
