// The binary under test and the programs that test it.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

assert.ok(process.env.SBCL_MCP_BIN, "SBCL_MCP_BIN names the binary");
export const BINARY = resolve(process.env.SBCL_MCP_BIN);

/** Returns the path of the script of a program that a package installs. */
export function program(name, command) {
  const directory = fileURLToPath(new URL(`node_modules/${name}`, import.meta.url));
  return join(directory, JSON.parse(readFileSync(join(directory, "package.json"), "utf8")).bin[command]);
}
