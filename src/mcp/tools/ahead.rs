//! An answer that does not wait for rmcp's turn.

use std::sync::Arc;

use rmcp::RoleServer;
use rmcp::model::{
    CallToolResponse, JsonRpcMessage, ProtocolVersion, RequestId, ServerNotification, ServerRequest, ServerResult,
};
use rmcp::service::RequestContext;

use super::{Desk, Reply, result};
use crate::mcp::link::Link;

/// Answers a call on the thread that has the answer. By way of rmcp it would have to come back to the thread that
/// drives the event loop, and wake it where that is another one.
pub(super) struct Ahead {
    link: Arc<Link>,
    id: RequestId,
    structured: bool,
    /// Characters that the answer may have.
    max: usize,
    /// The client's revision has no `resultType`.
    legacy: bool,
}

impl Ahead {
    pub(super) fn new(desk: &Desk, context: &RequestContext<RoleServer>) -> Self {
        Self {
            link: desk.link.clone(),
            id: context.id.clone(),
            structured: desk.structured,
            max: desk.max_answer(),
            legacy: context.protocol_version().is_none_or(|version| version < ProtocolVersion::V_2026_07_28),
        }
    }

    /// Answers. The handler has to end with an answer as well, which is dropped.
    pub(super) fn answer(self, reply: Reply) {
        let mut result = ServerResult::from(CallToolResponse::from(result(reply, self.structured, self.max)));
        if self.legacy {
            result.strip_result_type_for_legacy_peer();
        }
        let message = JsonRpcMessage::<ServerRequest, _, ServerNotification>::response(result, self.id.clone());
        self.link.answer_ahead(&self.id, &message);
    }
}
