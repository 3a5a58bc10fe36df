//! Formats figures for narrow columns.

/// Formats a rate: `7.5`, `850`, `12.3k`, `1.2M`.
pub fn rate(value: f64) -> String {
    match value {
        v if v <= 0.0 => "0".to_owned(),
        v if v < 0.095 => "<0.1".to_owned(),
        v if v < 9.95 => format!("{v:.1}"),
        v if v < 9_999.5 => format!("{v:.0}"),
        v if v < 99_950.0 => format!("{:.1}k", v / 1e3),
        v if v < 999_500.0 => format!("{:.0}k", v / 1e3),
        v if v < 99.95e6 => format!("{:.1}M", v / 1e6),
        v => format!("{:.0}M", v / 1e6),
    }
}

/// Formats a rate in megabytes per second.
pub fn megabytes(bytes: f64) -> String {
    rate(bytes / 1e6)
}

/// Formats a time in microseconds: `850us`, `1.2ms`, `30ms`, `1.5s`.
pub fn time(us: f64) -> String {
    match us {
        v if v < 9.95 => format!("{v:.1}us"),
        v if v < 999.5 => format!("{v:.0}us"),
        v if v < 9_950.0 => format!("{:.1}ms", v / 1e3),
        v if v < 999_500.0 => format!("{:.0}ms", v / 1e3),
        v if v < 99.5e6 => format!("{:.1}s", v / 1e6),
        v => format!("{:.0}s", v / 1e6),
    }
}

/// Formats a time, or returns a dash.
pub fn time_or_dash(us: Option<f64>) -> String {
    us.map_or_else(|| "-".to_owned(), time)
}

/// Formats the 99th percentile. If there are too few requests for it, returns `<` and the maximum.
pub fn p99(p99: Option<f64>, max: Option<f64>) -> String {
    match (p99, max) {
        (Some(us), _) => time(us),
        (None, Some(us)) => format!("<{}", time(us)),
        (None, None) => "-".to_owned(),
    }
}

pub fn percent(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"))
}

/// Cuts a text to `width` characters. The last character of a cut text is `more`.
pub fn cut(text: &str, width: usize, more: char) -> String {
    match text.chars().count() > width {
        false => text.to_owned(),
        true => {
            let kept = text.chars().take(width.saturating_sub(1));
            kept.chain((width > 0).then_some(more)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.05, "<0.1"),
            (7.46, "7.5"),
            (9.96, "10"),
            (9_999.0, "9999"),
            (12_340.0, "12.3k"),
            (456_000.0, "456k"),
            (1.23e6, "1.2M"),
        ] {
            assert_eq!(rate(value), text);
            assert!(text.len() <= 5);
        }
        for (us, text) in [
            (0.5, "0.5us"),
            (850.0, "850us"),
            (1_240.0, "1.2ms"),
            (30_260.0, "30ms"),
            (1.5e6, "1.5s"),
        ] {
            assert_eq!(time(us), text);
        }
        assert_eq!(p99(None, Some(30_000.0)), "<30ms");
        assert_eq!(
            (cut("abcdef", 4, '~'), cut("abc", 3, '~')),
            ("abc~".into(), "abc".into())
        );
        assert_eq!(cut("abc", 0, '~'), "");
    }
}
