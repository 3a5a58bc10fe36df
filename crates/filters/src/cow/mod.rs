//! `cow`: keeps changes in an overlay above the image. The overlay is an image itself and is
//! created where images are opened; this module only describes the filter to users.

use crate::about::{About, Opt};
use crate::filter::Kind;
use crate::layer::Layer;
use crate::live::View;
use crate::registry::Filters;
use crate::values::Values;
use fathom_core::{Channel, Cx, DiskInfo, PartState, RequestId};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Description of the filter `cow`, by which other crates recognize it.
pub static COW: &About = Cow::ABOUT;

/// A filter that passes all requests on. The overlay is already in place below all filters, since
/// it was created when the image was opened.
pub struct Cow(PathBuf);

impl Kind for Cow {
    const ABOUT: &'static About = &About {
        name: "cow",
        what: "keep changes in a temporary qcow2 overlay, directly above the image",
        options: &[Opt::new(
            "dir",
            "DIR",
            "/var/tmp",
            "directory of the overlay, which is deleted when the server ends",
        )],
    };

    type Settings = PathBuf;

    fn parse(values: &Values<'_>) -> Result<PathBuf, String> {
        values.get("dir", |dir| Ok(dir.into()))
    }

    fn new(dir: &PathBuf, _: &Filters, _: Option<PartState>) -> Result<Cow, String> {
        Ok(Cow(dir.clone()))
    }

    fn changing(&self, to: &PathBuf) -> Result<(), String> {
        match *to == self.0 {
            true => Ok(()),
            false => Err("cow: dir: cannot be changed while the overlay is in use".into()),
        }
    }

    fn layer(
        self: &Arc<Self>,
        _: View<PathBuf>,
        _: &mut Cx,
        _: &DiskInfo,
    ) -> io::Result<Box<dyn Layer>> {
        Ok(Box::new(Nothing))
    }
}

struct Nothing;

impl Layer for Nothing {
    fn submit(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        below.submit(cx, id);
    }
}
