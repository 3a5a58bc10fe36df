//! Errors in the format of RFC 9457.

use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use fathom_control::{ErrorKind, RequestError};
use fathom_units::{cause, redacted};
use serde::Serialize;
use utoipa::ToSchema;

/// Content type of a problem.
pub const CONTENT_TYPE: &str = "application/problem+json";

/// Why a request failed, in the format of RFC 9457.
#[derive(Debug, Serialize, ToSchema)]
pub struct Problem {
    #[serde(rename = "type")]
    kind: ProblemKind,
    /// HTTP status.
    status: u16,
    /// Name of the HTTP status.
    title: &'static str,
    /// Description of the problem in one line, with a remedy.
    detail: String,
}

/// Kind of a problem, for programs.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub enum ProblemKind {
    #[serde(rename = "urn:fathom:problem:invalid")]
    Invalid,
    #[serde(rename = "urn:fathom:problem:forbidden")]
    Forbidden,
    #[serde(rename = "urn:fathom:problem:unknown")]
    Unknown,
    #[serde(rename = "urn:fathom:problem:method")]
    Method,
    #[serde(rename = "urn:fathom:problem:slow")]
    Slow,
    #[serde(rename = "urn:fathom:problem:conflict")]
    Conflict,
    #[serde(rename = "urn:fathom:problem:changed")]
    Changed,
    #[serde(rename = "urn:fathom:problem:exists")]
    Exists,
    #[serde(rename = "urn:fathom:problem:too-large")]
    TooLarge,
    #[serde(rename = "urn:fathom:problem:failed")]
    Failed,
    #[serde(rename = "urn:fathom:problem:busy")]
    Busy,
    #[serde(rename = "urn:fathom:problem:ending")]
    Ending,
    #[serde(rename = "urn:fathom:problem:late")]
    Late,
}

impl ProblemKind {
    fn status(self) -> StatusCode {
        match self {
            ProblemKind::Invalid => StatusCode::BAD_REQUEST,
            ProblemKind::Forbidden => StatusCode::FORBIDDEN,
            ProblemKind::Unknown => StatusCode::NOT_FOUND,
            ProblemKind::Method => StatusCode::METHOD_NOT_ALLOWED,
            ProblemKind::Slow => StatusCode::REQUEST_TIMEOUT,
            ProblemKind::Conflict => StatusCode::CONFLICT,
            ProblemKind::Changed | ProblemKind::Exists => StatusCode::PRECONDITION_FAILED,
            ProblemKind::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            ProblemKind::Failed => StatusCode::UNPROCESSABLE_ENTITY,
            ProblemKind::Busy | ProblemKind::Ending => StatusCode::SERVICE_UNAVAILABLE,
            ProblemKind::Late => StatusCode::GATEWAY_TIMEOUT,
        }
    }
}

impl From<ErrorKind> for ProblemKind {
    fn from(kind: ErrorKind) -> ProblemKind {
        match kind {
            ErrorKind::Invalid => ProblemKind::Invalid,
            ErrorKind::Unknown => ProblemKind::Unknown,
            ErrorKind::Conflict => ProblemKind::Conflict,
            ErrorKind::Failed => ProblemKind::Failed,
            ErrorKind::Late => ProblemKind::Late,
            ErrorKind::Changed => ProblemKind::Changed,
            ErrorKind::Exists => ProblemKind::Exists,
        }
    }
}

impl Problem {
    pub fn new(kind: ProblemKind, detail: impl Into<String>) -> Problem {
        let status = kind.status();
        Problem {
            kind,
            status: status.as_u16(),
            title: status.canonical_reason().unwrap_or_default(),
            detail: cause(redacted(&detail.into())),
        }
    }

    /// Returns the error for a request that cannot be understood.
    pub fn invalid(detail: impl Into<String>) -> Problem {
        Problem::new(ProblemKind::Invalid, detail)
    }

    pub fn ending() -> Problem {
        Problem::new(ProblemKind::Ending, "the server is stopping")
    }
}

impl From<RequestError> for Problem {
    fn from(error: RequestError) -> Problem {
        Problem::new(error.kind.into(), error.text)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = self.kind.status();
        let mut response = axum::Json(self).into_response();
        *response.status_mut() = status;
        let json = HeaderValue::from_static(CONTENT_TYPE);
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        response
    }
}

pub async fn no_such_place(uri: Uri) -> Problem {
    let detail = format!("no resource {}; /openapi.json lists all", uri.path());
    Problem::new(ProblemKind::Unknown, detail)
}

pub async fn no_such_method(method: Method, uri: Uri) -> Problem {
    let detail = format!(
        "{method} is not allowed for {}; /openapi.json lists the methods",
        uri.path()
    );
    Problem::new(ProblemKind::Method, detail)
}
