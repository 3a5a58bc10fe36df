//! Filters in a table: a list of texts such as `throttle:iops-total=3000`.

use fathom_filters::{Spec, find};
use serde::{Deserialize, Deserializer, Serializer, de};

pub(super) fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Spec>, D::Error> {
    let texts = Vec::<String>::deserialize(from)?;
    let specs = texts.iter().map(|text| {
        let spec: Spec = text.parse()?;
        find(&spec.name)?.check(&spec.options)?;
        Ok(spec)
    });
    let specs: Result<_, String> = specs.collect();
    specs.map_err(de::Error::custom)
}

pub(super) fn write<S: Serializer>(specs: &[Spec], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(specs.iter().map(ToString::to_string))
}
