// Opening a session, listing tools, long answers, closing.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { describe, it } from "node:test";

import { MODES, serve } from "./server.js";

const TOOLS = JSON.parse(await readFile(new URL("../tools.json", import.meta.url), "utf8"));

for (const mode of MODES) {
  describe(mode.name, () => {
    it("reports version, capabilities and instructions", () =>
      serve(mode, async (server) => {
        const { client } = server;
        assert.equal(client.getServerVersion().name, "sbcl-mcp");
        assert.ok(client.getServerVersion().version);
        assert.ok(client.getServerCapabilities().tools);
        assert.match(client.getInstructions(), /describe-last-error/);
        // Some clients cut the instructions at this length.
        assert.ok(Buffer.byteLength(client.getInstructions()) <= 2000);
        if (client.getNegotiatedProtocolVersion) {
          assert.equal(client.getNegotiatedProtocolVersion(), mode.modern ? "2026-07-28" : "2025-11-25");
        }
        assert.equal(await server.evaluate("(+ 1 2)"), "=> 3");
      }));

    it("lists the tools of tools.json", () =>
      serve(mode, async (server) => {
        const { tools } = await server.client.listTools();
        assert.deepEqual(tools.map((tool) => tool.name).sort(), TOOLS.map((tool) => tool.name).sort());
        assert.equal(tools.find((tool) => tool.name === "evaluate-lisp")._meta["anthropic/alwaysLoad"], true);
        for (const expected of TOOLS) {
          const tool = tools.find((candidate) => candidate.name === expected.name);
          assert.ok(tool, expected.name);
          assert.ok(tool.description);
          const { type, properties = {}, required = [] } = tool.inputSchema;
          assert.equal(type, "object");
          // Keywords that some clients' converters refuse.
          assert.doesNotMatch(JSON.stringify(tool.inputSchema), /"(anyOf|\$ref|additionalProperties)":/);
          assert.deepEqual([...required], expected.required);
          const types = Object.entries(properties).map(([name, of]) => [name, of.type]);
          assert.deepEqual(Object.fromEntries(types), expected.arguments);
          assert.ok(Object.values(properties).every((of) => of.description));
          for (const hint of ["readOnlyHint", "destructiveHint"]) {
            if (hint in expected) assert.equal(tool.annotations[hint], expected[hint], `${tool.name} ${hint}`);
          }
        }
      }));

    it("refuses unknown tools and still works", () =>
      serve(mode, async (server) => {
        for (const name of ["", "evaluate_lisp", "EVALUATE-LISP"]) {
          await assert.rejects(server.call(name, { code: "1" }), { code: -32602 });
        }
        assert.equal(await server.evaluate("(+ 1 2)"), "=> 3");
      }));

    it("sends a long answer completely", () =>
      serve(mode, async (server) => {
        await server.call("configure-limits", { "max-answer": 1_000_000 });
        const text = await server.evaluate("(dotimes (i 20000) (format t \"line ~5,'0d λ~%\" i)) :done");
        const lines = Array.from({ length: 20000 }, (_, number) => `line ${String(number).padStart(5, "0")} λ`);
        assert.equal(text, `[stdout]\n${lines.join("\n")}\n\n=> :DONE`);
      }));

    it("shows the omitted part of a long answer", () =>
      serve(mode, async (server) => {
        const text = await server.evaluate("(dotimes (i 1000) (format t \"line ~5,'0d λ~%\" i)) :done");
        assert.ok(text.length <= 9500);
        const marker = String.raw`\[\.\.\. (\d+) characters omitted; check-evaluation (\{.*?\}) shows them\]`;
        const answer = new RegExp(String.raw`^\[stdout\]\n(.*)${marker}(.*)\n\n=> :DONE$`, "s");
        const [, head, count, call, tail] = text.match(answer);
        const args = JSON.parse(call);
        assert.deepEqual(args, { id: 1, part: "output", from: head.length });
        const shown = await server.call("check-evaluation", { ...args, limit: Number(count) });
        assert.equal(shown.isError, false, shown.text);
        // A page ends with the marker of the next one.
        const [, title, middle] = shown.text.match(new RegExp(`^(.*?)\n(.*)${marker}$`, "s"));
        const last = head.length + Number(count) - 1;
        assert.equal(title, `Evaluation 1, output, characters ${head.length} to ${last} of 13000:`);
        const lines = Array.from({ length: 1000 }, (_, number) => `line ${String(number).padStart(5, "0")} λ`);
        assert.equal(head + middle + tail, lines.join("\n"));
      }));

    it("exits with the client and answers pending calls", async () => {
      const refusals = [];
      await serve(mode, async (server) => {
        for (const code of ["(loop)", "(sleep 600)"]) {
          refusals.push(assert.rejects(server.evaluate(code)));
        }
        // Both calls have been sent when this is answered.
        await server.client.listTools();
      });
      await Promise.all(refusals);
    });
  });
}
