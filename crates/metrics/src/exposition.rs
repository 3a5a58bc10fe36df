//! A page of metrics in the requested format.

use super::exemplars::Exemplars;
use super::families::{DISKS, DURATION};
use super::form::Form;
use super::guest::Guest;
use super::measured::{Measured, ProcessInfo};
use super::pieces::Pieces;
use super::process;
use super::samples::{Family, Samples, Style};
use super::scale::Scale;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, prometheus_protobuf, prometheus_text, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use prost::Message;
use std::fmt;
use std::sync::Arc;

/// The contents of a page.
#[derive(Debug)]
pub struct Page {
    /// Measurements of the disks, in the order of the page.
    pub disks: Vec<Measured>,
    /// The guests of the disks that are in use, with the index of the disk.
    pub guests: Vec<(usize, Guest)>,
    /// The metrics of this process.
    pub own: ProcessInfo,
    /// Bounds of the histograms' buckets.
    pub scale: Arc<Scale>,
    /// Format of the page.
    pub form: Form,
}

/// The part of a page that is written at once.
#[derive(Clone, Copy, Debug)]
enum Part {
    Build,
    Disks(&'static Family),
    Guests,
    Processes,
}

impl Part {
    fn all() -> impl Iterator<Item = Part> {
        let disks = DISKS.iter().map(Part::Disks);
        let others = [Part::Guests, Part::Processes];
        [Part::Build].into_iter().chain(disks).chain(others)
    }

    fn has_exemplars(self) -> bool {
        matches!(self, Part::Disks(family) if family.name == DURATION)
    }
}

/// Writes the page piece by piece to `take`, which may return an error to stop.
///
/// Writing the page takes about 0.1 ms per disk.
pub fn expose(page: Page, take: impl FnMut(Vec<u8>) -> fmt::Result) -> fmt::Result {
    let page = Arc::new(page);
    let mut pieces = Pieces::new(take);
    // All families stay allocated until the last is made: otherwise their memory would be released
    // and allocated again each time.
    let mut families = Vec::new();
    for part in Part::all() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Shared(page.clone(), part)));
        match page.form {
            Form::OpenMetrics if part.has_exemplars() => {
                let mut text = String::new();
                text::encode_registry(&mut text, &registry)?;
                Exemplars::of(&page.disks)?.into_text(&text, &mut pieces)?;
            }
            Form::OpenMetrics => text::encode_registry(&mut pieces, &registry)?,
            Form::Text => prometheus_text::encode(&mut pieces, &registry)?,
            Form::Protobuf => {
                let mut made = prometheus_protobuf::encode(&registry)?;
                if part.has_exemplars() {
                    Exemplars::of(&page.disks)?.into_families(&mut made);
                }
                families.append(&mut made);
            }
        }
    }
    for family in families {
        pieces.take(family.encode_length_delimited_to_vec())?;
    }
    if page.form == Form::OpenMetrics {
        text::encode_eof(&mut pieces)?;
    }
    pieces.end()
}

/// A part of a shared page, for a registry.
#[derive(Debug)]
struct Shared(Arc<Page>, Part);

impl Collector for Shared {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let Shared(page, part) = self;
        match part {
            Part::Build => build(to),
            Part::Disks(family) => page.disks(family, to),
            Part::Guests => page.guests(to),
            Part::Processes => process::expose(&page.own, &page.disks, page.style(), &mut to),
        }
    }
}

fn build(mut to: DescriptorEncoder<'_>) -> fmt::Result {
    let help = "The server's version";
    let mut to = to.encode_descriptor("fathom_build", help, None, MetricType::Info)?;
    to.encode_info(&[("version", env!("CARGO_PKG_VERSION"))])
}

impl Page {
    fn disks(&self, family: &Family, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let name = format!("fathom_{}", family.name);
        let mut to = to.encode_descriptor(&name, family.help, family.unit.as_ref(), family.kind)?;
        self.disks.iter().try_for_each(|disk| {
            let mut samples = Samples::new(&mut to, self.style(), ("disk", &disk.info.name));
            (family.samples)(disk, &mut samples)
        })
    }

    fn style(&self) -> Style<'_> {
        Style {
            scale: &self.scale,
            form: self.form,
        }
    }

    fn guests(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let help = "The virtual machine that uses a disk";
        let mut to = to.encode_descriptor("fathom_guest", help, None, MetricType::Info)?;
        for (index, guest) in &self.guests {
            let disk = ("disk", &*self.disks[*index].info.name);
            Samples::new(&mut to, self.style(), disk).info(&guest.labels())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
