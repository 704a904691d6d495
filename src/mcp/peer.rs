//! Who asks.

use rmcp::model::{ClientCapabilities, ProtocolVersion, RequestMetaObject, ServerResult};

/// What a request's `_meta` says, as `true`, to get what a person's client needs: structured content whatever the server
/// was started with, the session's package in the result's `_meta` ([`PACKAGE`]), and all of the output in reports of progress.
pub(crate) const FOR_PERSON: &str = "sbcl-mcp/person";
/// What a call of evaluate-lisp's `_meta` says, as `true`, to have only the first form evaluated: the structured content's
/// `read` is where that ends, in characters, and is not there without a form.
pub(crate) const ONE_FORM: &str = "sbcl-mcp/one-form";
/// Where a result's `_meta` has the name of the package that the session is in.
pub(crate) const PACKAGE: &str = "sbcl-mcp/package";

/// What a request says of its client, itself or by the handshake.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) version: ProtocolVersion,
    pub(super) meta: RequestMetaObject,
    /// What the handshake said.
    pub(super) capabilities: Option<ClientCapabilities>,
}

impl Peer {
    /// True where a person's client asks ([`FOR_PERSON`]).
    pub(super) fn is_for_person(&self) -> bool {
        self.says(FOR_PERSON)
    }

    /// True where it wants one form evaluated at a time ([`ONE_FORM`]).
    pub(super) fn is_form_by_form(&self) -> bool {
        self.says(ONE_FORM)
    }

    fn says(&self, key: &str) -> bool {
        self.meta.0.0.get(key).and_then(serde_json::Value::as_bool) == Some(true)
    }

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
