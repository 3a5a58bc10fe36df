//! A disk that is copied to another one.

use super::Served;
use crate::command::MirrorOrder;
use crate::objects::mirror::{Order, Running};
use crate::options::DiskOptions;
use crate::table::{DiskTable, check_path};
use fathom_jobs::Source;
use fathom_jobs::mirror::Terms;

impl Served {
    /// What it takes to begin. The error is for the user.
    pub fn mirror_order(&self, order: MirrorOrder, has_nbd: bool) -> Result<Order, String> {
        let (options, stack) = (&self.options, &self.stack);
        let table = self.table().ok_or("its options are not known")?;
        let table: DiskTable = table.clone().on(order.target, order.format);
        table.image.path().map_or(Ok(()), check_path)?;
        Ok(Order {
            disk: options.name.clone(),
            source: Source {
                disk: self.shared.for_follower(stack.tap.below().clone()),
                engine: options.disk.engine,
                tap: stack.tap.clone(),
                workers: stack.workers.clone(),
            },
            terms: Terms {
                rate: order.speed,
                brakes: order.active,
            },
            target: DiskOptions::of(table, has_nbd)?,
            shared: self.shared.clone(),
            events: self.events.clone(),
        })
    }

    /// Why it cannot be copied to where it would be the same.
    pub fn may_not_be_mirrored(&self) -> Option<String> {
        if self.is_changed_by_others() {
            Some("other processes may change it, who would not be noticed".into())
        } else if self.moves.going.is_some() {
            Some("another server may take it over (nbd-move)".into())
        } else if self.table().is_some_and(|table| has_filter(table, "cow")) {
            Some("its changes go with the server (--filter cow)".into())
        } else {
            self.may_not_be_disturbed()
        }
    }

    pub fn set_mirror(&mut self, mirror: Running) {
        self.mirror = Some(mirror);
    }

    pub fn mirror(&self) -> Option<&Running> {
        self.mirror.as_ref()
    }

    /// It has ended, and somebody has heard of it.
    pub fn forget_mirror(&mut self) {
        self.mirror = None;
    }
}

fn has_filter(table: &DiskTable, name: &str) -> bool {
    table.filters.iter().any(|filter| filter.name == name)
}
