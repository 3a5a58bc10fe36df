//! Messages about image formats.

use fathom_formats::Format;

/// Returns why an image with this magic is not served without `--format`.
pub fn refusal(format: &str) -> String {
    let other = match Format::from_name(format) {
        Ok(format) if format.is_only_read() => {
            format!(
                "pass --format {format} --readonly to read the disk in it, or convert it \
                 ('fathom img convert')"
            )
        }
        Ok(_) => format!("pass --format {format} to serve the disk in it"),
        Err(_) => "which is not supported; convert it (qemu-img convert -O qcow2)".into(),
    };
    format!(
        "looks like a {format} image; {other}, or pass --format raw to serve its bytes as they \
         are"
    )
}

/// Returns why a format that the user asked for is not supported.
pub fn unsupported(format: &str) -> String {
    format!("{format} images are not supported; convert the image (qemu-img convert -O qcow2)")
}
