//! A filtered disk, and a worker's channel to it.

use crate::filter::Filter;
use crate::layer::Layer;
use fathom_core::{
    Channel, Cx, Disk, DiskError, DiskInfo, DiskLayer, Mark, Owner, Request, RequestId, Resize,
};
use std::sync::Arc;
use std::time::Duration;

struct Layered {
    layer: Box<dyn Layer>,
    below: Box<dyn Channel>,
    /// The last owner with children among the layers below and this one.
    newest: Owner,
}

impl Layered {
    /// Passes the completions since the mark to the layer, including those that the layer causes.
    fn settle(&mut self, cx: &mut Cx, mut mark: Mark) {
        loop {
            let mut completed = cx.completed_since(mark);
            mark = cx.mark();
            while let Some(id) = completed.next(cx) {
                let owner = cx.slab[id].owner;
                if owner == Owner::SOURCE || owner > self.newest {
                    self.layer.completed(cx, id);
                }
            }
            self.layer.settled(cx, &mut *self.below);
            if cx.mark() == mark {
                return;
            }
        }
    }
}

impl Channel for Layered {
    fn submit(&mut self, cx: &mut Cx, id: RequestId) {
        let mark = cx.mark();
        self.layer.submit(cx, id, &mut *self.below);
        self.settle(cx, mark);
    }

    fn complete(&mut self, cx: &mut Cx, id: RequestId, tag: u16, result: i32) {
        let mark = cx.mark();
        self.below.complete(cx, id, tag, result);
        self.settle(cx, mark);
    }

    fn timer(&mut self, cx: &mut Cx) {
        let mark = cx.mark();
        self.below.timer(cx);
        self.layer.timer(cx, &mut *self.below);
        self.settle(cx, mark);
    }

    fn drain(&mut self, cx: &mut Cx, source: u16) {
        let mark = cx.mark();
        self.layer.drain(cx, source, &mut *self.below);
        self.below.drain(cx, source);
        self.settle(cx, mark);
    }

    fn answered(&mut self, request: &Request) {
        self.layer.answered(request);
        self.below.answered(request);
    }
}

/// Returns `disk` behind a filter.
pub fn wrap(disk: Arc<dyn Disk>, filter: Arc<dyn Filter>) -> Arc<dyn Disk> {
    Arc::new(Filtered {
        below: disk,
        filter,
    })
}

struct Filtered {
    below: Arc<dyn Disk>,
    filter: Arc<dyn Filter>,
}

impl DiskLayer for Filtered {
    fn below(&self) -> &dyn Disk {
        &*self.below
    }

    fn info(&self) -> DiskInfo {
        self.filter.info(self.below.info())
    }

    fn connect_delay(&self) -> Duration {
        self.filter.connect_delay() + self.below.connect_delay()
    }

    fn activate(&self) -> Result<(), DiskError> {
        self.below.activate()?;
        self.filter.opened();
        Ok(())
    }

    fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
        let before = self.below.info().size;
        let resized = self.below.resize(to);
        // After an error, too, the disk may have another size.
        let now = self.below.info().size;
        if resized.is_ok() || now != before {
            self.filter.resized(before, now);
        }
        resized
    }

    fn channel(&self, cx: &mut Cx) -> Result<Box<dyn Channel>, DiskError> {
        let below = self.below.channel(cx)?;
        let layer = self.filter.layer(cx, &self.below.info());
        let layer = layer.map_err(|source| DiskError::Io {
            path: self.filter.about().name.into(),
            what: "cannot start the filter on a worker",
            source,
        })?;
        Ok(Box::new(Layered {
            layer,
            below,
            newest: cx.newest_owner(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::about::About;
    use fathom_core::testing::TestDisk;
    use fathom_core::{Part, Resize};
    use parking_lot::Mutex;
    use std::io;

    /// A disk that shrinks and reports an error.
    struct Shrinking {
        below: Arc<TestDisk>,
        size: Mutex<u64>,
    }

    impl DiskLayer for Shrinking {
        fn below(&self) -> &dyn Disk {
            &*self.below
        }

        fn info(&self) -> DiskInfo {
            DiskInfo {
                size: *self.size.lock(),
                ..self.below.info()
            }
        }

        fn resize(&self, to: &Resize) -> Result<u64, DiskError> {
            *self.size.lock() = to.size.expect("a size");
            Err(DiskError::Refused("the new size is not durable".into()))
        }
    }

    /// A filter that records the sizes that the disk reports.
    #[derive(Default)]
    struct Listening(Mutex<Vec<(u64, u64)>>);

    impl Part for Listening {}

    impl Filter for Listening {
        fn about(&self) -> &'static About {
            unreachable!("not asked for")
        }

        fn values(&self) -> Vec<(&'static str, String)> {
            Vec::new()
        }

        fn set(&self, _: &[(String, String)]) -> Result<(), String> {
            Ok(())
        }

        fn resized(&self, before: u64, now: u64) {
            self.0.lock().push((before, now));
        }

        fn layer(&self, _: &mut Cx, _: &DiskInfo) -> io::Result<Box<dyn Layer>> {
            unreachable!("the disk has no worker")
        }
    }

    #[test]
    fn filter_sees_the_size_after_a_failed_resize() {
        let filter = Arc::new(Listening::default());
        let disk = Shrinking {
            below: TestDisk::new(),
            size: Mutex::new(4096),
        };
        let disk = wrap(Arc::new(disk), filter.clone());
        for _ in 0..2 {
            let resized = disk.resize(&Resize {
                size: Some(512),
                shrink: true,
                settle: &|| Ok(()),
            });
            assert!(resized.is_err());
        }
        assert_eq!(*filter.0.lock(), [(4096, 512)]);
    }
}
