//! Errors in the format of RFC 9457.

use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use fathom_control::{ErrorKind, RequestError};
use fathom_units::{cause, redacted};
use serde::Serialize;
use utoipa::ToSchema;

/// Why a request failed, in the format of RFC 9457.
#[derive(Debug, Serialize, ToSchema)]
pub struct Problem {
    /// Kind of the problem, for programs: `urn:fathom:problem:` and a word, such as `unknown` or `conflict`.
    #[serde(rename = "type")]
    kind: String,
    /// HTTP status.
    status: u16,
    /// Name of the HTTP status.
    title: &'static str,
    /// Description of the problem in one line, with a remedy.
    detail: String,
}

impl Problem {
    pub fn new(status: StatusCode, word: &str, detail: impl Into<String>) -> Problem {
        Problem {
            kind: format!("urn:fathom:problem:{word}"),
            status: status.as_u16(),
            title: status.canonical_reason().unwrap_or_default(),
            detail: cause(redacted(&detail.into())),
        }
    }

    /// Returns the error for a request that cannot be understood.
    pub fn invalid(detail: impl Into<String>) -> Problem {
        Problem::new(StatusCode::BAD_REQUEST, ErrorKind::Invalid.name(), detail)
    }

    pub fn ending() -> Problem {
        let detail = "the server is stopping";
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "ending", detail)
    }
}

impl From<RequestError> for Problem {
    fn from(error: RequestError) -> Problem {
        let status = match error.kind {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::Unknown => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Failed => StatusCode::UNPROCESSABLE_ENTITY,
            ErrorKind::Late => StatusCode::GATEWAY_TIMEOUT,
            ErrorKind::Changed | ErrorKind::Exists => StatusCode::PRECONDITION_FAILED,
        };
        Problem::new(status, error.kind.name(), error.text)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status);
        let mut response = axum::Json(self).into_response();
        *response.status_mut() = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let json = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(header::CONTENT_TYPE, json);
        response
    }
}

pub async fn no_such_place(uri: Uri) -> Problem {
    let detail = format!("no resource {}; /openapi.json lists all", uri.path());
    Problem::new(StatusCode::NOT_FOUND, ErrorKind::Unknown.name(), detail)
}

pub async fn no_such_method(method: Method, uri: Uri) -> Problem {
    let detail = format!(
        "{method} is not allowed for {}; /openapi.json lists the methods",
        uri.path()
    );
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method", detail)
}
