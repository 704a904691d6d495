//! What rmcp asks of a server.

use std::borrow::Cow;

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, ErrorData, Implementation, ListToolsResult, PaginatedRequestParams,
    ProtocolVersion, ServerCapabilities, ServerConfig,
};
use rmcp::service::RequestContext;
use rmcp::{RoleServer, ServerHandler};

use super::tools::{self, Desk};
use super::unwind;

/// The revisions that are tested. The last one has no handshake.
const REVISIONS: &[ProtocolVersion] = &[
    ProtocolVersion::V_2024_11_05,
    ProtocolVersion::V_2025_03_26,
    ProtocolVersion::V_2025_06_18,
    ProtocolVersion::V_2025_11_25,
    ProtocolVersion::V_2026_07_28,
];

/// The session as an MCP server.
#[derive(Debug)]
pub(super) struct Server {
    desk: Desk,
    /// Made once: schemas do not change while the server runs.
    tools: ListToolsResult,
}

impl Server {
    pub(super) fn new(desk: Desk) -> Self {
        let tools = ListToolsResult::with_all_items(desk.tools());
        Self { desk, tools }
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let name = Implementation::new("sbcl-mcp", crate::VERSION).with_title("SBCL (Common Lisp)");
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(name)
            .with_instructions(include_str!("instructions.md").trim_end())
    }

    fn supported_protocol_versions(&self) -> Cow<'static, [ProtocolVersion]> {
        Cow::Borrowed(REVISIONS)
    }

    async fn list_tools(
        &self,
        request: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        match request.and_then(|request| request.cursor) {
            None => Ok(self.tools.clone()),
            Some(_) => Err(ErrorData::invalid_params("unknown cursor: tools/list has one page", None)),
        }
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let name = request.name.clone();
        match unwind::caught(|| tools::call(&self.desk, request, &context)).await {
            Ok(answer) => answer,
            Err(panic) => Err(ErrorData::internal_error(format!("{name} failed: {panic}"), None)),
        }
    }
}
