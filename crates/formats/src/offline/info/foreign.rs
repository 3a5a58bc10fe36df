//! Details of foreign images.

use fathom_foreign::{Description, Details};
use serde_json::Value;
use std::fmt::{self, Formatter};
use std::path::Path;

/// Returns the image's details as JSON, by QEMU's names where QEMU has them. `path` is the image's
/// path.
pub(super) fn to_json(image: &Description, path: &Path) -> Value {
    let mut data = serde_json::to_value(&image.details).unwrap_or_default();
    if let Details::Vmdk { extents, .. } = &image.details {
        for (n, extent) in extents.iter().enumerate() {
            let file = match &extent.name {
                Some(name) => path.with_file_name(name),
                None => path.to_owned(),
            };
            data["extents"][n]["filename"] = file.display().to_string().into();
        }
    }
    data
}

/// Formats details as text. Each line is indented by `indent` spaces.
pub(super) fn fmt(f: &mut Formatter<'_>, data: &Value, indent: usize) -> fmt::Result {
    let line = |f: &mut Formatter<'_>, name: &str, value: &Value| match value {
        Value::Object(_) | Value::Array(_) => {
            writeln!(f, "{:indent$}{name}:", "")?;
            fmt(f, value, indent + 4)
        }
        Value::String(text) => writeln!(f, "{:indent$}{name}: {}", "", crate::shown(text)),
        value => writeln!(f, "{:indent$}{name}: {value}", ""),
    };
    match data {
        Value::Object(fields) => {
            let mut fields = fields.iter();
            fields.try_for_each(|(name, value)| line(f, &name.replace('-', " "), value))
        }
        Value::Array(values) => {
            let mut values = values.iter().enumerate();
            values.try_for_each(|(n, value)| line(f, &format!("[{n}]"), value))
        }
        _ => Ok(()),
    }
}
