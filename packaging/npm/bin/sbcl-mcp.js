#!/usr/bin/env node
// Starts the program from the package for this platform, and passes on its streams, signals and exit status.
"use strict";

const { spawn } = require("child_process");
const os = require("os");

const name = `sbcl-mcp-${process.platform}-${process.arch}`;
let program;
try {
  program = require.resolve(`${name}/bin/sbcl-mcp`);
} catch {
  console.error(`sbcl-mcp: the package ${name} is not installed. Either this platform is not supported, or optional ` +
    "dependencies were left out (npm install --include=optional).");
  process.exit(1);
}

// The program inherits the client's pipes.
const child = spawn(program, process.argv.slice(2), { stdio: "inherit" });
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) {
  process.on(signal, () => child.kill(signal));
}
child.on("error", (error) => {
  console.error(`sbcl-mcp: cannot start ${program}: ${error.message}`);
  process.exit(1);
});
child.on("exit", (status, signal) => process.exit(signal ? 128 + os.constants.signals[signal] : status));
