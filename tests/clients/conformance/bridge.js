// Serves the server over HTTP, the only transport of the conformance suite, with one server process per session.

import { randomUUID } from "node:crypto";
import { once } from "node:events";
import { createServer } from "node:http";

import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPServerTransport } from "@modelcontextprotocol/sdk/server/streamableHttp.js";

/**
 * Serves `command` and passes each message of the client through `adapted`. Returns the URL and a function that closes
 * the bridge.
 */
export async function bridge(command, adapted) {
  const sessions = new Map();
  const processes = [];

  async function open() {
    const process = new StdioClientTransport({ command });
    const http = new StreamableHTTPServerTransport({
      sessionIdGenerator: randomUUID,
      onsessioninitialized: (id) => sessions.set(id, http),
    });
    // The server's own messages belong to the last request.
    let last;
    http.onmessage = (message) => {
      if ("method" in message && "id" in message) last = message.id;
      process.send(adapted(message));
    };
    process.onmessage = (message) => http.send(message, { relatedRequestId: last });
    await process.start();
    processes.push(process);
    return http;
  }

  const server = createServer(async (request, response) => {
    const http = sessions.get(request.headers["mcp-session-id"]) ?? (await open());
    await http.handleRequest(request, response);
  });
  await once(server.listen(0, "127.0.0.1"), "listening");

  async function close() {
    server.closeAllConnections();
    server.close();
    await Promise.all(processes.map((process) => process.close()));
  }
  return { url: `http://127.0.0.1:${server.address().port}/mcp`, close };
}
