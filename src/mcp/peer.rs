//! Who asks.

use rmcp::model::{ClientCapabilities, ProtocolVersion, RequestMetaObject, ServerResult};

/// What a request says of its client, itself or by the handshake.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) version: ProtocolVersion,
    pub(super) meta: RequestMetaObject,
    /// What the handshake said.
    pub(super) capabilities: Option<ClientCapabilities>,
}

impl Peer {
    /// What the client can do.
    pub(super) fn capabilities(&self) -> Option<ClientCapabilities> {
        self.meta.client_capabilities().or_else(|| self.capabilities.clone())
    }

    /// True for a revision without a handshake.
    pub(super) fn is_modern(&self) -> bool {
        !self.version.has_initialize()
    }
}

/// A result in the shape of the client's revision.
pub(super) fn fitted(mut result: ServerResult, peer: &Peer) -> ServerResult {
    if peer.is_modern() {
        result.fill_missing_cache_hints();
    } else {
        result.strip_result_type_for_legacy_peer();
    }
    result
}
