//! `pause`: freezes and thaws a disk.

use crate::about::{About, Opt};
use crate::filter::Kind;
use crate::layer::Layer;
use crate::live::View;
use crate::registry::Filters;
use crate::values::{Values, yes_or_no};
use fathom_core::{Channel, Cx, DiskInfo, PartState, RequestId};
use std::io;
use std::sync::Arc;

pub(crate) struct Pause;

impl Kind for Pause {
    const ABOUT: &'static About = &About {
        name: "pause",
        what: "take no new requests; they wait at the guest or client, and none is lost",
        options: &[Opt::new(
            "frozen",
            "yes|no",
            "no",
            "take no new requests, and complete those in flight",
        )],
    };

    /// Whether the disk is frozen.
    type Settings = bool;

    fn parse(values: &Values<'_>) -> Result<bool, String> {
        values.get("frozen", yes_or_no)
    }

    fn new(_: &bool, _: &Filters, _: Option<PartState>) -> Result<Pause, String> {
        Ok(Pause)
    }

    fn layer(
        self: &Arc<Self>,
        frozen: View<bool>,
        cx: &mut Cx,
        _: &DiskInfo,
    ) -> io::Result<Box<dyn Layer>> {
        if *frozen {
            cx.close();
        }
        Ok(Box::new(Gate { frozen }))
    }
}

/// Passes all requests, including those that were popped before the disk was frozen.
struct Gate {
    frozen: View<bool>,
}

impl Layer for Gate {
    fn submit(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        below.submit(cx, id);
    }

    fn timer(&mut self, cx: &mut Cx, _: &mut dyn Channel) {
        self.frozen.refresh();
        if *self.frozen {
            cx.close();
        }
    }
}
