// Runs the calls of conversations.json and checks the answers: see ../README.md.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { describe, it } from "node:test";

import { MODES, serve } from "./server.js";

const CONVERSATIONS = JSON.parse(await readFile(new URL("../conversations.json", import.meta.url), "utf8"));
const PLACEHOLDERS = { "{time}": "\\d{4}-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\dZ", "{number}": "\\d+" };

function assertText(text, expected) {
  const pieces = expected.split(/(\{time\}|\{number\})/);
  const escape = (piece) => piece.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&");
  const pattern = new RegExp(`^${pieces.map((piece) => PLACEHOLDERS[piece] ?? escape(piece)).join("")}$`);
  // The comparison as text makes node show where they differ.
  if (!pattern.test(text)) assert.equal(text, expected);
}

async function checkCall(server, call, before) {
  if ("rpc-error" in call) {
    await assert.rejects(server.call(call.tool, call.arguments), { code: call["rpc-error"] });
    return undefined;
  }
  const { text, isError } = await server.call(call.tool, call.arguments);
  assert.equal(isError, call.error ?? false, text);
  if ("text" in call) assertText(text, call.text.join("\n"));
  if ("starts" in call) {
    const beginning = call.starts.join("\n");
    assert.equal(text.slice(0, beginning.length), beginning);
  }
  for (const part of call.contains ?? []) assert.ok(text.includes(part), `${JSON.stringify(part)} is not in:\n${text}`);
  if (call.same) assert.equal(text, before);
  return text;
}

for (const mode of MODES) {
  describe(mode.name, () => {
    for (const conversation of CONVERSATIONS) {
      it(conversation.name, () =>
        serve(mode, async (server) => {
          let before;
          for (const call of conversation.calls) before = await checkCall(server, call, before);
        }));
    }
  });
}
