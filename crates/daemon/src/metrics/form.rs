//! As what metrics are written.

/// How a page is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    OpenMetrics,
    /// Prometheus's text of before.
    Text,
    /// Prometheus's own, with native histograms.
    Protobuf,
}

impl Form {
    /// The first that this `Accept` names; without one that is known, OpenMetrics.
    pub fn wanted(accept: &str) -> Form {
        let known = |one: &str| {
            let mut parts = one.split(';').map(str::trim);
            match parts.next()? {
                "application/vnd.google.protobuf" => parts
                    .all(|part| !part.starts_with("encoding=") || part == "encoding=delimited")
                    .then_some(Form::Protobuf),
                "application/openmetrics-text" => Some(Form::OpenMetrics),
                "text/plain" => Some(Form::Text),
                _ => None,
            }
        };
        accept
            .split(',')
            .find_map(known)
            .unwrap_or(Form::OpenMetrics)
    }

    /// Lines, which say no native histograms.
    pub fn is_text(self) -> bool {
        self != Form::Protobuf
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Form::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Form::Text => "text/plain; version=0.0.4; charset=utf-8",
            Form::Protobuf => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; \
                 encoding=delimited"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_gets_the_first_form_that_is_known() {
        for (accept, form) in [
            ("", Form::OpenMetrics),
            ("*/*", Form::OpenMetrics),
            ("text/html, text/plain;q=0.5", Form::Text),
            (
                "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
                Form::OpenMetrics,
            ),
            (
                "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,\
                 application/openmetrics-text",
                Form::Protobuf,
            ),
            (
                "application/vnd.google.protobuf;encoding=text,text/plain",
                Form::Text,
            ),
        ] {
            assert_eq!(Form::wanted(accept), form, "{accept}");
        }
    }
}
