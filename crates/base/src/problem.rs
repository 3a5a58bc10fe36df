//! What goes wrong with what is fetched.

/// Why something does not come. One line each, without the image's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// It may come later.
    Away(String),
    /// It has no place here.
    Full,
    /// What has come is not what it should be; another time it may be.
    Wrong(String),
    /// It does not come.
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
