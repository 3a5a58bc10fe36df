//! `-o help`: the options of a format, with their values and defaults.

use super::print;
use fathom_img::Format;

/// Maximum length in characters of options whose descriptions are aligned in one column.
const COLUMN: usize = 30;

/// Prints the named options of `format`, one per line.
pub(super) fn print_options(format: Format, names: &[&str]) -> anyhow::Result<()> {
    print(text(format, names))
}

fn text(format: Format, names: &[&str]) -> String {
    let options: Vec<_> = names.iter().map(|name| describe(format, name)).collect();
    let lengths = options.iter().map(|(option, _)| option.len());
    let width = lengths.filter(|length| *length <= COLUMN).max();
    let width = width.unwrap_or_default();
    let line = |(option, about): &(String, &str)| format!("{option:<width$}  {about}\n");
    options.iter().map(line).collect()
}

/// Returns `NAME=VALUE` and the description of an option. An unknown name has no description.
fn describe(format: Format, name: &str) -> (String, &'static str) {
    let is_qed = matches!(format, Format::Qed);
    let (value, about) = match name.strip_prefix("encrypt.").unwrap_or(name) {
        "backing_file" => ("PATH", "Backing image, as -b"),
        "backing_fmt" => ("FORMAT", "Format of the backing image, as -F"),
        "cipher-alg" => ("aes-256", "Cipher; aes-256 is the only one"),
        "cipher-mode" => ("xts", "Mode of the cipher; xts is the only one"),
        "cluster_size" if is_qed => (
            "SIZE",
            "Bytes of a cluster, a power of two from 4k to 64M [default: 64k]",
        ),
        "cluster_size" => (
            "SIZE",
            "Bytes of a cluster, a power of two from 512 to 2M [default: 64k]",
        ),
        "compat" => (
            "0.10|1.1",
            "Version 2 or 3 of the format, also v2 or v3 [default: 1.1]",
        ),
        "compression_type" => (
            "zlib|zstd",
            "Compression of compressed clusters [default: zlib]",
        ),
        "data_file" => (
            "PATH",
            "External data file, for the data of the guest [default: none]",
        ),
        "data_file_raw" => (
            "on|off",
            "Keep the external data file valid as a raw image [default: off]",
        ),
        "extended_l2" => (
            "on|off",
            "Divide each cluster into 32 subclusters [default: off]",
        ),
        "format" => (
            "luks",
            "Encrypt the guest's data with the key of --key [default: not encrypted]",
        ),
        "hash-alg" => (
            "sha1|sha256|sha512",
            "Hash for unlocking the image [default: sha256]",
        ),
        "iter-time" => (
            "MS",
            "Milliseconds that unlocking the image takes [default: 2000]",
        ),
        "ivgen-alg" => (
            "plain64",
            "Generator of initialization vectors; plain64 is the only one",
        ),
        "lazy_refcounts" => (
            "on|off",
            "Allow QEMU to write refcounts late [default: off]",
        ),
        "preallocation" if format == Format::Raw => {
            ("off|falloc|full", "Space to allocate [default: off]")
        }
        "preallocation" => (
            "off|metadata|falloc|full",
            "Tables or space to allocate [default: off]",
        ),
        "refcount_bits" => (
            "N",
            "Bits of a refcount, a power of two from 1 to 64 [default: 16]",
        ),
        "sector-size" => (
            "BYTES",
            "Bytes of an encrypted sector, 512 to 4096 (version 2) [default: 512]",
        ),
        "size" => ("SIZE", "Size of the disk, such as 20G"),
        "table_size" => ("N", "Clusters of a table: 1, 2, 4, 8 or 16 [default: 4]"),
        "version" => ("1|2", "Version of the LUKS format [default: 1]"),
        _ => return (name.to_owned(), ""),
    };
    (format!("{name}={value}"), about)
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_img::CreateOptions;

    #[test]
    fn all_options_of_all_formats_are_described() {
        for format in [Format::Raw, Format::Qcow2, Format::Qed, Format::Luks] {
            let names = CreateOptions::names(format);
            let text = text(format, names);
            assert_eq!(text.lines().count(), names.len());
            for (line, name) in text.lines().zip(names) {
                assert!(line.starts_with(&format!("{name}=")), "{line}");
                assert!(line.len() <= 100 && line.contains("  "), "{line}");
            }
        }
    }
}
