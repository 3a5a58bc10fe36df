//! Errors of fetching stripes.

/// A reason why a stripe is unavailable; its text is one line without the image's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The remote is away, or the cache cannot be written. A retry may succeed.
    Away(String),
    /// The file system of the cache is full.
    Full,
    /// The fetched data is wrong. A retry may succeed.
    Wrong(String),
    /// A retry cannot succeed.
    Never(String),
}

impl Problem {
    pub fn text(&self) -> &str {
        match self {
            Problem::Full => "no space is left",
            Problem::Away(text) | Problem::Wrong(text) | Problem::Never(text) => text,
        }
    }
}
