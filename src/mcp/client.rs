//! The description of a client, from its handshake and from each of its requests.

use rmcp::model::{ClientCapabilities, ProtocolVersion, RequestMetaObject, ServerResult};

/// Key in the `_meta` of a request. The value `true` says that the client serves a person. Results then always have
/// structured content, whose output is not shortened to `max-answer`, and the session's package in their `_meta`
/// ([`PACKAGE_KEY`]); progress reports have all output.
pub(crate) const FOR_PERSON_KEY: &str = "sbcl-mcp/person";
/// Key in the `_meta` of a call of evaluate-lisp. With the value `true`, only the first form is evaluated. `read` in the
/// structured content is then the character index of the form's end, and is missing if there is no form.
pub(crate) const ONE_FORM_KEY: &str = "sbcl-mcp/one-form";
/// Key in the `_meta` of a result. The value is the name of the session's package.
pub(crate) const PACKAGE_KEY: &str = "sbcl-mcp/package";

/// The protocol revision, metadata and capabilities of the client that made a request.
#[derive(Debug, Clone)]
pub(super) struct Client {
    pub(super) version: ProtocolVersion,
    pub(super) meta: RequestMetaObject,
    /// The capabilities from the handshake, for requests without capabilities.
    pub(super) capabilities: Option<ClientCapabilities>,
}

impl Client {
    /// Returns true if the client serves a person ([`FOR_PERSON_KEY`]).
    pub(super) fn is_for_person(&self) -> bool {
        self.has_flag(FOR_PERSON_KEY)
    }

    /// Returns true if only the first form is to be evaluated ([`ONE_FORM_KEY`]).
    pub(super) fn wants_one_form(&self) -> bool {
        self.has_flag(ONE_FORM_KEY)
    }

    fn has_flag(&self, key: &str) -> bool {
        self.meta.0.0.get(key).and_then(serde_json::Value::as_bool) == Some(true)
    }

    /// Returns the client's capabilities from the request, or else from the handshake.
    pub(super) fn capabilities(&self) -> Option<ClientCapabilities> {
        self.meta.client_capabilities().or_else(|| self.capabilities.clone())
    }

    /// Returns true if the client's protocol revision has no handshake.
    pub(super) fn has_no_handshake(&self) -> bool {
        !self.version.has_initialize()
    }
}

/// Adapts a result to the client's protocol revision: adds the cache hints that a revision without a handshake requires, and
/// removes `resultType` for the older revisions.
pub(super) fn adapt_to_revision(mut result: ServerResult, client: &Client) -> ServerResult {
    if client.has_no_handshake() {
        result.fill_missing_cache_hints();
    } else {
        result.strip_result_type_for_legacy_peer();
    }
    result
}
