//! Converts the errors of object stores to this crate's errors.

use crate::error::Error;
use object_store::Error as StoreError;
use object_store::client::{HttpError, HttpErrorKind};
use std::error::Error as StdError;
use std::io;

/// The kinds of places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    S3,
    Web,
}

/// Converts an error that the store reported for `what`.
pub(crate) fn store_error(kind: Kind, what: &str, error: StoreError) -> Error {
    let what = what.to_owned();
    let text = error.to_string();
    if text.contains("<Code>NoSuchBucket</Code>") {
        return Error::unusable(what, "no such bucket; create it, or check the name");
    }
    match &error {
        StoreError::NotFound { .. } => return Error::NotFound { what },
        StoreError::Precondition { .. } => return Error::Changed { what },
        StoreError::AlreadyExists { .. } => return Error::Exists { what },
        StoreError::NotSupported { .. } if kind == Kind::Web => {
            return Error::unusable(what, NO_RANGES);
        }
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. }
            if kind != Kind::File =>
        {
            let problem = refusal(kind, &text);
            return Error::Refused { what, problem };
        }
        _ => {}
    }
    // Without credentials, the client requests them from the metadata service that only clouds
    // have.
    if kind == Kind::S3 && text.contains("169.254.1") {
        let problem = format!("no credentials; {CREDENTIALS}");
        return Error::Refused { what, problem };
    }
    if let Some(http) = cause::<HttpError>(&error) {
        return unanswered(what, http);
    }
    if let Some(status) = status_of(&text) {
        let problem = answered(status, &text);
        return match status {
            404 => Error::NotFound { what },
            401 | 403 => Error::Refused {
                what,
                problem: refusal(kind, &text),
            },
            // The server does not implement the request, so a retry would not help.
            501 => Error::Unusable { what, problem },
            500.. | 408 | 429 => Error::Unreachable { what, problem },
            _ => Error::Unusable { what, problem },
        };
    }
    match cause::<io::Error>(&error) {
        Some(source) if source.kind() == io::ErrorKind::NotFound => Error::NotFound { what },
        Some(source) => {
            let source = match source.raw_os_error() {
                Some(errno) => io::Error::from_raw_os_error(errno),
                None => io::Error::new(source.kind(), source.to_string()),
            };
            Error::Io { what, source }
        }
        None => Error::unusable(what, one_line(&innermost(&error))),
    }
}

pub(crate) const NO_RANGES: &str =
    "its server does not support range requests, which fathom needs; use another server";

const CREDENTIALS: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for public \
     objects";

fn refusal(kind: Kind, text: &str) -> String {
    match (kind, between(text, "<Code>", "</Code>")) {
        (Kind::S3, Some(code)) => {
            format!("{code}; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        }
        (Kind::S3, None) => "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY".into(),
        _ => "its server requires authentication".into(),
    }
}

/// Converts the error of a request that failed before or during the response.
fn unanswered(what: String, error: &HttpError) -> Error {
    let problem = one_line(&innermost(error));
    match error.kind() {
        HttpErrorKind::Timeout => Error::Unreachable {
            what,
            problem: "no reply in time".into(),
        },
        _ if problem.contains("peer certificate") => {
            let hint = "SSL_CERT_FILE names a file of authorities to trust instead of the system's";
            Error::unusable(
                what,
                format!("its server's certificate is not trusted: {problem}; {hint}"),
            )
        }
        HttpErrorKind::Connect | HttpErrorKind::Request | HttpErrorKind::Interrupted => {
            Error::Unreachable { what, problem }
        }
        // The response was truncated.
        _ if problem.contains("end of file") || problem.contains("closed") => {
            Error::Unreachable { what, problem }
        }
        _ => Error::Unusable { what, problem },
    }
}

fn answered(status: u16, text: &str) -> String {
    let code = between(text, "<Code>", "</Code>");
    let message = between(text, "<Message>", "</Message>");
    let said = [code, message]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(": ");
    match said.is_empty() {
        true => format!("its server replied {status}"),
        false => one_line(&format!("its server replied {status} ({said})")),
    }
}

/// Extracts the HTTP status from an error's text, because the store does not return it otherwise.
pub(crate) fn status_of(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("non-2xx status code: ")?;
    rest.get(..3)?.parse().ok()
}

fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(start)?;
    rest.split_once(end).map(|(found, _)| found)
}

/// Iterates over an error and its sources.
fn causes<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn StdError + 'static)| {
        (**error).source()
    })
}

/// Finds the first error of type `T` among an error and its sources.
fn cause<'a, T: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a T> {
    causes(error).find_map(|error| error.downcast_ref())
}

fn innermost(error: &(dyn StdError + 'static)) -> String {
    causes(error).last().expect("itself, at least").to_string()
}

/// Converts text of others to one line of limited length without control characters.
fn one_line(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    let line: String = words
        .join(" ")
        .chars()
        .filter(|c| !c.is_control())
        .collect();
    match line.char_indices().nth(200) {
        Some((at, _)) => format!("{}...", &line[..at]),
        None => line,
    }
}
