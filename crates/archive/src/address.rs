//! Parses addresses as users write them.

use crate::error::Error;
use std::path::PathBuf;
use url::Url;

/// An address of an object or of an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    File(PathBuf),
    /// The key neither starts nor ends with a slash.
    S3 {
        bucket: String,
        key: String,
    },
    Web(Url),
}

impl Address {
    pub(crate) fn parse(text: &str) -> Result<Address, Error> {
        if let Some(rest) = text.strip_prefix("s3://") {
            return s3(text, rest);
        }
        match text.split_once("://") {
            Some(("http" | "https", _)) => web(text),
            Some((scheme, _)) if is_scheme(scheme) => Err(Error::unusable(
                text,
                "not an address; write s3://..., https://..., http://... or a path",
            )),
            _ if text.is_empty() => Err(Error::unusable("''", "not a path")),
            _ => Ok(Address::File(text.into())),
        }
    }

    /// Returns the address for people, without its query, which may contain a secret.
    pub(crate) fn shown(&self) -> String {
        match self {
            Address::File(path) => path.display().to_string(),
            Address::S3 { bucket, key } if key.is_empty() => format!("s3://{bucket}"),
            Address::S3 { bucket, key } => format!("s3://{bucket}/{key}"),
            Address::Web(url) => {
                let mut url = url.clone();
                url.set_query(None);
                url.to_string()
            }
        }
    }
}

fn is_scheme(text: &str) -> bool {
    !text.is_empty()
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
}

const SECRETS: &str = "credentials must not be in an address, which other users can see";

fn s3(text: &str, rest: &str) -> Result<Address, Error> {
    let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.contains('@') {
        let hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";
        return Err(Error::unusable("s3://", format!("{SECRETS}: {hint}")));
    }
    let is_known = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    if bucket.is_empty() || !bucket.chars().all(is_known) {
        return Err(Error::unusable(text, "no bucket; write s3://BUCKET/KEY"));
    }
    Ok(Address::S3 {
        bucket: bucket.into(),
        key: key.trim_matches('/').into(),
    })
}

fn web(text: &str) -> Result<Address, Error> {
    let mut url = Url::parse(text).map_err(|error| Error::unusable(text, error.to_string()))?;
    if !url.username().is_empty() || url.password().is_some() {
        let shown = format!("{}://", url.scheme());
        return Err(Error::unusable(shown, SECRETS));
    }
    url.set_fragment(None);
    Ok(Address::Web(url))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_what_they_look_like() {
        let shown = |text: &str| Address::parse(text).map(|address| address.shown());
        let same = [
            "s3://bucket",
            "s3://bucket/a/b",
            "https://host/a",
            "http://[::1]:8080/",
            "a/b",
            "/a b",
            "./s3://bucket",
        ];
        for text in same {
            assert_eq!(shown(text).unwrap(), text);
        }
        assert_eq!(shown("s3://bucket//a/").unwrap(), "s3://bucket/a");
        let signed = "https://host/a?X-Amz-Signature=secret";
        assert_eq!(shown(signed).unwrap(), "https://host/a");
        for text in [
            "",
            "s3://",
            "s3:///a",
            "s3://a b/c",
            "gs://bucket",
            "https://",
        ] {
            shown(text).expect_err(text);
        }
    }

    #[test]
    fn secrets_in_addresses_are_refused_and_not_shown() {
        for text in ["s3://key:secret@bucket/a", "https://key:secret@host/a"] {
            let error = Address::parse(text).unwrap_err().to_string();
            assert!(error.contains("credentials"), "{error}");
            assert!(
                !error.contains("secret@") && !error.contains("key:"),
                "{error}"
            );
        }
    }
}
