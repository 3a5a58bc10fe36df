//! A page of metrics, as who asks for it wants it.

use super::exemplars::Exemplars;
use super::families::DISKS;
use super::form::Form;
use super::guest::Guest;
use super::measured::{Measured, ProcessInfo};
use super::process;
use super::samples::{Samples, Style};
use super::scale::Scale;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, prometheus_protobuf, prometheus_text, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use prost::Message;
use std::fmt;
use std::sync::Arc;

/// What a page is made of.
#[derive(Debug)]
pub struct Page {
    pub disks: Vec<Measured>,
    /// Of the disks that one uses, by their place among these.
    pub guests: Vec<(usize, Guest)>,
    /// This process.
    pub own: ProcessInfo,
    pub scale: Arc<Scale>,
    pub form: Form,
}

/// The page. (It takes some time: 0.1 ms a disk.)
pub fn expose(page: Page) -> Result<Vec<u8>, fmt::Error> {
    let page = Arc::new(page);
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Shared(page.clone())));
    let mut text = String::new();
    match page.form {
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
                let mut samples = Samples::new(&mut to, self.style(), ("disk", &disk.info.name));
                (family.samples)(disk, &mut samples)?;
            }
        }
        self.guests(&mut to)?;
        process::expose(&self.own, &self.disks, self.style(), &mut to)
    }

    fn style(&self) -> Style<'_> {
        Style {
            scale: &self.scale,
            form: self.form,
        }
    }

    fn guests(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "The virtual machine that uses a disk";
        let mut to = to.encode_descriptor("fathom_guest", help, None, MetricType::Info)?;
        for (index, guest) in &self.guests {
            let disk = ("disk", &*self.disks[*index].info.name);
            Samples::new(&mut to, self.style(), disk).info(&guest.labels())?;
        }
        Ok(())
    }
}
