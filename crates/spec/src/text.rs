//! Values in files and messages that are written as people write them: a text that is parsed, or a
//! number of bytes.

use fathom_units::parse_size;
use serde::{Deserialize, Deserializer, Serializer, de};
use std::fmt::Display;
use std::str::FromStr;

/// Writes the value as a string.
pub fn serialize<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// Parses the value from a string.
///
/// # Errors
/// If the input is not a string, or the string cannot be parsed.
pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
    from: D,
) -> Result<T, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map_err(de::Error::custom)
}

/// Fields that may be absent or null, which stand for `None`.
pub mod optional {
    use super::*;

    /// Writes the value as a string, and `None` as null.
    pub fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => to.collect_str(value),
            None => to.serialize_none(),
        }
    }

    /// Parses the value from a string. Null is read as `None`.
    ///
    /// # Errors
    /// If the input is neither a string nor null, or the string cannot be parsed.
    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<T>, D::Error> {
        parse(from, str::parse)
    }

    /// A string that `parse` takes, or nothing.
    pub fn parse<'de, D: Deserializer<'de>, T, E: Display>(
        from: D,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<Option<T>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        let value = text.as_deref().map(parse).transpose();
        value.map_err(de::Error::custom)
    }
}

/// Fields with a list of such values.
pub mod list {
    use super::*;

    /// Writes the values as a list of strings.
    pub fn serialize<T: Display, S: Serializer>(values: &[T], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(values.iter().map(T::to_string))
    }

    /// Parses each value of a list from a string.
    ///
    /// # Errors
    /// If the input is not a list of strings, or a string cannot be parsed.
    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Vec<T>, D::Error> {
        let texts = Vec::<String>::deserialize(from)?;
        let values = texts
            .iter()
            .map(|text| text.parse().map_err(de::Error::custom));
        values.collect()
    }
}

/// `"4G"`, or a number of bytes.
pub fn size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "not a size such as \"4G\" or 512")]
    enum Size {
        Bytes(u64),
        Text(String),
    }
    match Option::<Size>::deserialize(from)? {
        None => Ok(None),
        Some(Size::Bytes(bytes)) => Ok(Some(bytes)),
        Some(Size::Text(text)) => parse_size(&text).map(Some).map_err(de::Error::custom),
    }
}
