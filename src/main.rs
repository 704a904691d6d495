//! The command `sbcl-mcp`: SBCL for MCP clients, and for a person's one-liners.

fn main() {
    sbcl::cli::main()
}
