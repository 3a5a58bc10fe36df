//! Filters as texts such as `throttle:iops-total=3000`, in lists and options.

use fathom_filters::{Spec, find};
use serde::{Deserialize, Deserializer, Serializer, de};

/// Parses a filter, and checks its options.
pub fn parse(text: &str) -> Result<Spec, String> {
    let spec: Spec = text.parse()?;
    find(&spec.name)?.check(&spec.options)?;
    Ok(spec)
}

pub(crate) fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Spec>, D::Error> {
    let texts = Vec::<String>::deserialize(from)?;
    let specs: Result<_, String> = texts.iter().map(|text| parse(text)).collect();
    specs.map_err(de::Error::custom)
}

pub(crate) fn write<S: Serializer>(specs: &[Spec], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(specs.iter().map(ToString::to_string))
}
