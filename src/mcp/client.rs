//! The description of a client, from its handshake and from each of its requests.

use rmcp::model::{ElicitationCapability, ProgressToken, ProtocolVersion, RequestMetaObject, ServerResult};
use serde_json::Value;

/// Key in the `_meta` of a request. The value `true` says that the client serves a person. Results then always have
/// structured content, whose output is not shortened to `max-answer`, and the session's package in their `_meta`
/// ([`PACKAGE_KEY`]); progress reports have all output.
pub(crate) const FOR_PERSON_KEY: &str = "sbcl-mcp/person";
/// Key in the `_meta` of a call of evaluate-lisp. With the value `true`, only the first form is evaluated. `read` in the
/// structured content is then the character index of the form's end, and is missing if there is no form.
pub(crate) const ONE_FORM_KEY: &str = "sbcl-mcp/one-form";
/// Key in the `_meta` of a result. The value is the name of the session's package.
pub(crate) const PACKAGE_KEY: &str = "sbcl-mcp/package";

/// The protocol revision, metadata and capabilities of the client that made a request. Thousands of requests may wait for
/// their answers, so only what is used of the metadata and capabilities is kept: decoded JSON may take a hundred times the
/// memory of its text.
#[derive(Debug, Clone)]
pub(super) struct Client {
    pub(super) version: ProtocolVersion,
    pub(super) progress_token: Option<ProgressToken>,
    /// The client's capability to ask the user.
    pub(super) elicitation: Option<ElicitationCapability>,
    /// True if the client serves a person ([`FOR_PERSON_KEY`]).
    pub(super) is_for_person: bool,
    /// True if only the first form is to be evaluated ([`ONE_FORM_KEY`]).
    pub(super) wants_one_form: bool,
}

impl Client {
    /// Creates the description from the `_meta` of a request. `elicitation` is the capability from the handshake, for a
    /// request without capabilities.
    pub(super) fn new(
        version: ProtocolVersion,
        meta: &RequestMetaObject,
        elicitation: Option<ElicitationCapability>,
    ) -> Self {
        let has_flag = |key: &str| meta.0.0.get(key).and_then(Value::as_bool) == Some(true);
        Self {
            version,
            progress_token: meta.get_progress_token(),
            elicitation: meta.client_capabilities().map_or(elicitation, |capabilities| capabilities.elicitation),
            is_for_person: has_flag(FOR_PERSON_KEY),
            wants_one_form: has_flag(ONE_FORM_KEY),
        }
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
