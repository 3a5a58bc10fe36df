//! The page at `/`, which shows live numbers in a browser. The page only reads `/v1/live`, and
//! loads nothing from other servers.

use axum::http::header;
use axum::response::{IntoResponse, Response};
use fathom_requests::new_identity;

const PAGE: &str = include_str!("page.html");
/// Placeholder for the nonce in the page.
const NONCE: &str = "NONCE";

pub async fn page() -> Response {
    // The nonce is unpredictable, and the browser only uses scripts and styles that have it.
    let nonce = new_identity();
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::CONTENT_SECURITY_POLICY, policy),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (header::REFERRER_POLICY, "no-referrer".to_owned()),
        (header::CACHE_CONTROL, "no-store".to_owned()),
    ];
    (headers, PAGE.replace(NONCE, &nonce)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_the_page_has_is_in_it() {
        for tag in ["<script", "<style"] {
            let parts: Vec<_> = PAGE.split(tag).skip(1).collect();
            assert_eq!(parts.len(), 1, "{tag}");
            assert!(parts[0].starts_with(" nonce=\"NONCE\">"), "{tag}");
        }
        assert_eq!(PAGE.matches(NONCE).count(), 2);
        // Names come from clients: the page inserts them as text, never as markup.
        for way in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ] {
            assert!(!PAGE.contains(way), "{way}");
        }
        for elsewhere in ["http://", "https://", " src=", "@import", "url("] {
            assert!(!PAGE.contains(elsewhere), "{elsewhere}");
        }
    }
}
