// Concurrent calls, cancellation, progress.

import assert from "node:assert/strict";
import { access, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { describe, it } from "node:test";
import { setTimeout as pause } from "node:timers/promises";

import { MODES, NO_ERROR, serve } from "./server.js";

const LIMITS = [
  "Current limits:",
  "  timeout: 30 seconds",
  "  max-output: 1000000 characters",
  "  max-answer: 9500 characters",
  "  on-error: abort",
].join("\n");

/** Returns Lisp code that creates the file `runs` and waits for the file `go`, so that the order is certain. */
function waiting(directory) {
  return `(progn (open "${directory}/runs" :direction :probe :if-does-not-exist :create)
    (loop until (probe-file "${directory}/go") do (sleep 0.01)) :went-on)`;
}

const release = (directory) => writeFile(join(directory, "go"), "");

async function awaitRunning(directory) {
  for (;;) {
    try {
      return await access(join(directory, "runs"));
    } catch {
      await pause(10);
    }
  }
}

/** Does `work` while an evaluation runs, and asserts that it does not end before. */
async function busy(server, directory, options, work) {
  let over = false;
  const evaluation = server.evaluate(waiting(directory), options).finally(() => (over = true));
  await Promise.race([awaitRunning(directory), evaluation]);
  const result = await work();
  assert.equal(over, false);
  await release(directory);
  assert.equal(await evaluation, "=> :WENT-ON");
  return result;
}

for (const mode of MODES) {
  describe(mode.name, () => {
    it("answers other tools while an evaluation runs", () =>
      serve(mode, (server, directory) =>
        busy(server, directory, {}, async () => {
          assert.deepEqual(await server.call("describe-last-error", {}), { text: NO_ERROR, isError: false });
          assert.deepEqual(await server.call("get-backtrace", {}), { text: NO_ERROR, isError: false });
          assert.deepEqual(await server.call("configure-limits", {}), { text: LIMITS, isError: false });
          assert.ok((await server.client.listTools()).tools.length >= 7);
          // The revision without a handshake has no ping.
          if (!mode.modern) await server.client.ping();
        })));

    it("evaluates in the order of the calls", () =>
      serve(mode, async (server, directory) => {
        await server.evaluate("(defvar *order* '())");
        const pushes = await busy(server, directory, {}, async () => {
          const sent = Array.from({ length: 10 }, (_, number) => server.evaluate(`(push ${number} *order*)`));
          await server.client.listTools();
          // An async function would wait for a returned promise, but not for one in an object.
          return { sent };
        });
        await Promise.all(pushes.sent);
        assert.equal(await server.evaluate("(reverse *order*)"), "=> (0 1 2 3 4 5 6 7 8 9)");
      }));

    it("cancels a running evaluation", () =>
      serve(mode, async (server, directory) => {
        await server.evaluate("(defvar *kept* 42)");
        const abort = new AbortController();
        const code = `(loop (ignore-errors ${waiting(directory)}))`;
        const evaluation = assert.rejects(server.evaluate(code, { signal: abort.signal }));
        await awaitRunning(directory);
        abort.abort();
        await evaluation;
        let text = NO_ERROR;
        while (text === NO_ERROR) ({ text } = await server.call("describe-last-error", {}));
        assert.match(text, /^Error: CANCELLED\n/);
        assert.equal((await server.call("describe-last-error", {})).text, text);
        assert.equal(await server.evaluate("*kept*"), "=> 42");
        assert.equal((await server.call("describe-last-error", {})).text, NO_ERROR);
      }));

    it("does not run a cancelled queued evaluation", () =>
      serve(mode, async (server, directory) => {
        await server.evaluate("(defvar *ran* nil)");
        await busy(server, directory, {}, async () => {
          const abort = new AbortController();
          const evaluation = assert.rejects(server.evaluate("(setf *ran* t)", { signal: abort.signal }));
          await server.client.listTools();
          abort.abort();
          await evaluation;
          await server.client.listTools();
        });
        assert.equal(await server.evaluate("*ran*"), "=> NIL");
      }));
  });
}

for (const mode of [MODES[0], MODES.at(-1)]) {
  it(`${mode.name}: reports progress of a long evaluation`, () =>
    serve(mode, (server, directory) => {
      let onprogress;
      const alive = new Promise((resolve) => (onprogress = resolve));
      return busy(server, directory, { onprogress }, () => alive);
    }));
}
