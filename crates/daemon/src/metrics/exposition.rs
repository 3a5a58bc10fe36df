//! A page of metrics, as who asks for it wants it.

use super::exemplars::Exemplars;
use super::families::DISKS;
use super::guest::Guest;
use super::measured::{Measured, ProcessInfo};
use super::process;
use super::samples::Samples;
use super::scale::Scale;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, prometheus_protobuf, prometheus_text, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use prost::Message;
use std::fmt;
use std::sync::Arc;

/// How it is written.
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

/// What a page is made of.
#[derive(Debug)]
pub struct Page {
    pub disks: Vec<Measured>,
    /// Of the disks that one uses, by their place among these.
    pub guests: Vec<(usize, Guest)>,
    /// This process.
    pub own: ProcessInfo,
    pub scale: Arc<Scale>,
}

/// The page. (It takes some time: 0.1 ms a disk.)
pub fn expose(page: Page, form: Form) -> Result<Vec<u8>, fmt::Error> {
    let page = Arc::new(page);
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Shared(page.clone())));
    let mut text = String::new();
    match form {
        Form::OpenMetrics => {
            text::encode(&mut text, &registry)?;
            text = Exemplars::of(&page.disks)?.into_text(&text)?;
        }
        Form::Text => prometheus_text::encode(&mut text, &registry)?,
        Form::Protobuf => {
            let mut families = prometheus_protobuf::encode(&registry)?;
            Exemplars::of(&page.disks)?.into_families(&mut families);
            let mut bytes = Vec::new();
            for family in families {
                let encoded = family.encode_length_delimited(&mut bytes);
                encoded.map_err(|_| fmt::Error)?;
            }
            return Ok(bytes);
        }
    }
    Ok(text.into_bytes())
}

/// A page that is looked at afterwards, too.
#[derive(Debug)]
struct Shared(Arc<Page>);

impl Collector for Shared {
    fn encode(&self, to: DescriptorEncoder<'_>) -> fmt::Result {
        self.0.encode(to)
    }
}

impl Page {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let mut build = to.encode_descriptor(
            "fathom_build",
            "What serves the disks",
            None,
            MetricType::Info,
        )?;
        build.encode_info(&[("version", env!("CARGO_PKG_VERSION"))])?;
        for family in DISKS {
            let name = format!("fathom_{}", family.name);
            let mut to =
                to.encode_descriptor(&name, family.help, family.unit.as_ref(), family.kind)?;
            for disk in &self.disks {
                let mut samples = Samples::new(&mut to, &self.scale, ("disk", &disk.info.name));
                (family.samples)(disk, &mut samples)?;
            }
        }
        self.guests(&mut to)?;
        process::expose(&self.own, &self.disks, &self.scale, &mut to)
    }

    fn guests(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "The virtual machine that uses a disk";
        let mut to = to.encode_descriptor("fathom_guest", help, None, MetricType::Info)?;
        for (index, guest) in &self.guests {
            let disk = ("disk", &*self.disks[*index].info.name);
            Samples::new(&mut to, &self.scale, disk).info(&guest.labels())?;
        }
        Ok(())
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
