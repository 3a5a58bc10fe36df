//! `readonly`: rejects writes.

use crate::about::About;
use crate::filter::Kind;
use crate::layer::Layer;
use crate::live::View;
use crate::registry::Filters;
use crate::values::Values;
use fathom_core::{Channel, Cx, DiskInfo, Op, PartState, RequestId};
use std::io;
use std::sync::Arc;

pub(crate) struct Readonly;

impl Kind for Readonly {
    const ABOUT: &'static About = &About {
        name: "readonly",
        what: "make the disk read-only",
        options: &[],
    };

    type Settings = ();

    fn parse(_: &Values<'_>) -> Result<(), String> {
        Ok(())
    }

    fn new((): &(), _: &Filters, _: Option<PartState>) -> Result<Readonly, String> {
        Ok(Readonly)
    }

    fn info((): &(), below: DiskInfo) -> DiskInfo {
        DiskInfo {
            read_only: true,
            discard: None,
            write_zeroes: None,
            ..below
        }
    }

    fn layer(
        self: &Arc<Self>,
        _: View<()>,
        _: &mut Cx,
        _: &DiskInfo,
    ) -> io::Result<Box<dyn Layer>> {
        Ok(Box::new(Refusing))
    }
}

/// Rejects writes of the filters above. Exporters reject clients' writes to a read-only disk
/// themselves.
struct Refusing;

impl Layer for Refusing {
    fn submit(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        match cx.slab[id].op {
            Op::Write | Op::Discard | Op::WriteZeroes => cx.complete(id, libc::EROFS),
            _ => below.submit(cx, id),
        }
    }
}
