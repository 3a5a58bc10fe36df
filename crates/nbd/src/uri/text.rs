//! Parsing of parts of a URI (RFC 3986).

/// Iterates over the names and values of a query, still percent-encoded.
pub(super) fn query_of(query: &str) -> impl Iterator<Item = (&str, &str)> {
    let pairs = query.split(['&', ';']);
    pairs.filter_map(|pair| pair.split_once('='))
}

/// Decodes percent-encoded bytes (%XX).
pub(super) fn decode(text: &str) -> Result<String, String> {
    let bad = || format!("{text}: % must be followed by two hexadecimal digits");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, others)) = rest.split_first() {
        rest = others;
        if first != b'%' {
            bytes.push(first);
            continue;
        }
        let digits = rest.get(..2).ok_or_else(bad)?;
        let digits = std::str::from_utf8(digits).map_err(|_| bad())?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| bad())?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| format!("{text}: not UTF-8"))
}
