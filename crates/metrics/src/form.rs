//! Formats of a page of metrics.

/// The format of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The text format of OpenMetrics 1.0, which can express exemplars.
    OpenMetrics,
    /// Prometheus's older text format.
    Text,
    /// Prometheus's protobuf format, with native histograms.
    Protobuf,
}

impl Form {
    /// Returns the format that this `Accept` prefers (RFC 9110, section 12.5.1).
    ///
    /// If several are equally preferred, the first counts. If none is known, returns the text
    /// format, which all scrapers can read.
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
        let quality = |one: &str| {
            let mut parameters = one.split(';').skip(1).map(str::trim);
            let said = parameters.find_map(|one| one.strip_prefix("q="));
            said.map_or(1.0, |said| said.parse().unwrap_or(0.0))
        };
        let all = accept.split(',');
        let all = all.filter_map(|one| Some((known(one)?, quality(one))));
        let best = all
            .filter(|(_, quality)| *quality > 0.0)
            .reduce(|best, one| match one.1 > best.1 {
                true => one,
                false => best,
            });
        best.map_or(Form::Text, |(form, _): (Form, f64)| form)
    }

    /// Returns whether the format consists of lines, which cannot express native histograms.
    pub fn is_text(self) -> bool {
        self != Form::Protobuf
    }

    /// Returns the value of the header `Content-Type`.
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
    fn form_is_the_preferred_one_that_is_known() {
        for (accept, form) in [
            ("", Form::Text),
            ("*/*", Form::Text),
            ("application/openmetrics-text", Form::OpenMetrics),
            ("application/openmetrics-text;q=0", Form::Text),
            (
                "text/plain;version=0.0.4;q=0.3, application/openmetrics-text;version=1.0.0;q=0.5",
                Form::OpenMetrics,
            ),
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
