//! `fault`: injects the faults of real disks.

mod cache;
mod choice;
mod corrupt;
mod destage;
mod volatile;

use crate::about::{About, Opt};
use crate::filter::Kind;
use crate::layer::Layer;
use crate::live::View;
use crate::registry::Filters;
use crate::values::{Values, number, size, yes_or_no};
use cache::{Cache, Writes};
use choice::{Choice, History};
use fathom_core::{Channel, Cx, DiskInfo, Op, PartState, RequestId};
use fathom_units::cause;
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::json;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::sync::Arc;
use volatile::Volatile;

pub(crate) struct Fault {
    history: History,
    cache: Arc<Cache>,
}

pub(crate) struct Settings {
    choice: Choice,
    /// Errno of failing requests; 0 if requests do not fail.
    error: i32,
    hang: bool,
    corrupt: bool,
    writes: Writes,
    cache_size: u64,
}

/// Errors that storage or its driver can return.
const ERRORS: [(&str, i32); 9] = [
    ("EIO", libc::EIO),
    ("ENOSPC", libc::ENOSPC),
    ("ETIMEDOUT", libc::ETIMEDOUT),
    ("EROFS", libc::EROFS),
    ("ENOMEM", libc::ENOMEM),
    ("EINVAL", libc::EINVAL),
    ("EPERM", libc::EPERM),
    ("ENOTSUP", libc::EOPNOTSUPP),
    ("ESHUTDOWN", libc::ESHUTDOWN),
];

fn errno(text: &str) -> Result<i32, String> {
    let known = ERRORS.iter().find(|(name, _)| *name == text);
    known.map(|(_, errno)| *errno).ok_or_else(|| {
        let names: Vec<_> = ERRORS.iter().map(|(name, _)| *name).collect();
        format!("'{text}' is not one of {}", names.join(", "))
    })
}

impl Kind for Fault {
    const ABOUT: &'static About = &About {
        name: "fault",
        what: "inject errors, hangs, corrupted reads, and lost or torn writes",
        options: &[
            Opt::new(
                "error",
                "EIO|ENOSPC|ETIMEDOUT|...",
                "",
                "errno of failing operations",
            ),
            Opt::new(
                "hang",
                "yes|no",
                "no",
                "hold operations until this is set to no",
            ),
            Opt::new(
                "corrupt",
                "yes|no",
                "no",
                "flip a bit in each sector that is read",
            ),
            Opt::new(
                "op",
                "read+write+flush+trim+zero",
                "",
                "operations that are affected [default: all]",
            ),
            Opt::new(
                "range",
                "OFFSET+LEN",
                "",
                "byte range that is affected [default: all]",
            ),
            Opt::new(
                "probability",
                "0..1|PERCENT",
                "1",
                "share of operations that are affected; for corrupted reads, share of sectors",
            ),
            Opt::new(
                "seed",
                "NUMBER",
                "0",
                "seed of the random numbers, to repeat a run",
            ),
            Opt::new("count", "NUMBER", "0", "number of faults; 0: no limit"),
            Opt::new(
                "after",
                "BYTES",
                "0",
                "bytes to read and write before the first fault",
            ),
            Opt::new(
                "writes",
                "safe|lost|torn",
                "safe",
                "keep unflushed writes in memory only: whole ones (lost), or random physical \
                 blocks of each (torn); they are lost when the server ends",
            ),
            Opt::new(
                "cache-size",
                "BYTES",
                "64M",
                "size of that memory, which is written back when it is full",
            ),
            Opt::action("power-cut", "yes", "discard all unflushed writes now"),
        ],
    };

    type Settings = Settings;

    fn parse(values: &Values<'_>) -> Result<Settings, String> {
        Ok(Settings {
            choice: Choice::parse(values)?,
            error: values.optional("error", errno)?.unwrap_or(0),
            hang: values.get("hang", yes_or_no)?,
            corrupt: values.get("corrupt", yes_or_no)?,
            writes: values.get("writes", Writes::parse)?,
            cache_size: values.get("cache-size", |text| match size(text)? {
                size if (1 << 20..=1 << 40).contains(&size) => Ok(size),
                _ => Err("not from 1M to 1T".into()),
            })?,
        })
    }

    fn new(_: &Settings, _: &Filters, _: Option<PartState>) -> Result<Fault, String> {
        Ok(Fault {
            history: History::default(),
            cache: Arc::default(),
        })
    }

    fn changing(&self, _: &Settings) -> Result<(), String> {
        self.history.forget();
        Ok(())
    }

    fn act(&self, _power_cut: &'static str, value: &str) -> Result<(), String> {
        match value {
            "yes" => {
                let lost = self.cache.cut_power();
                tracing::info!(
                    "fault: {} KiB of unflushed data are lost (power-cut)",
                    lost >> 10
                );
                Ok(())
            }
            _ => Err("fault: power-cut: must be yes".into()),
        }
    }

    fn info(settings: &Settings, below: DiskInfo) -> DiskInfo {
        DiskInfo {
            // Otherwise no client would ever flush.
            write_cache: below.write_cache || settings.writes != Writes::Safe,
            ..below
        }
    }

    fn resized(&self, _before: u64, now: u64) {
        self.cache.cut(now / cache::SECTOR as u64);
    }

    fn check_handover(settings: &Settings) -> Result<(), String> {
        match settings.hang {
            true => Err(
                "its filter 'fault' holds requests (hang=yes), which cannot be handed over; set \
                 hang=no"
                    .into(),
            ),
            false => Ok(()),
        }
    }

    /// Passes nothing early: `final_state` has the unflushed sectors.
    fn early_state(&self) -> io::Result<Option<PartState>> {
        Ok(Some(PartState::default()))
    }

    fn final_state(&self) -> io::Result<Option<PartState>> {
        let (version, sectors) = self.cache.final_state();
        let mut file = File::from(memfd_create("fathom-cache", MemfdFlags::CLOEXEC)?);
        file.write_all(&sectors)?;
        Ok(Some(PartState {
            values: json!({ "counts": self.history.counts(), "version": version }),
            files: vec![file.into()],
            is_needed: !sectors.is_empty(),
        }))
    }

    fn restore(&self, mut left: PartState, is_same: bool) -> Result<(), String> {
        let mut file = File::from(left.take_file()?);
        let mut sectors = Vec::new();
        file.rewind()
            .and_then(|()| file.read_to_end(&mut sectors))
            .map_err(|error| format!("cannot read unflushed data: {}", cause(error)))?;
        self.cache.restore(left.number("version")?, &sectors);
        // After a change of options, the counts start anew.
        if is_same {
            let counts = serde_json::from_value(left.values["counts"].take());
            self.history
                .go_on_from(counts.map_err(|error| error.to_string())?);
        }
        Ok(())
    }

    fn layer(
        self: &Arc<Self>,
        settings: View<Settings>,
        cx: &mut Cx,
        below: &DiskInfo,
    ) -> io::Result<Box<dyn Layer>> {
        let block = below.physical_block_size;
        Ok(Box::new(Faulty {
            volatile: Volatile::new(self.cache.clone(), cx, block)?,
            kind: self.clone(),
            settings,
            hanging: Vec::new(),
        }))
    }
}

/// Order of the steps for a request: hang, fail, volatile cache, corruption of the data read.
struct Faulty {
    kind: Arc<Fault>,
    settings: View<Settings>,
    hanging: Vec<RequestId>,
    volatile: Volatile,
}

impl Faulty {
    fn pass(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        if self.settings.error != 0 || self.settings.hang {
            let request = &cx.slab[id];
            let is_chosen = self.settings.choice.takes(&self.kind.history, request);
            if is_chosen && self.settings.hang {
                return match cx.may_wait(id) {
                    true => self.hanging.push(id),
                    false => cx.complete(id, libc::EIO),
                };
            }
            if is_chosen {
                return cx.complete(id, self.settings.error);
            }
        }
        self.store(cx, id, below);
    }

    fn store(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        let settings = &*self.settings;
        let limits = (settings.writes, settings.cache_size, settings.choice.seed());
        self.volatile.submit(cx, id, below, limits);
    }
}

impl Layer for Faulty {
    fn submit(&mut self, cx: &mut Cx, id: RequestId, below: &mut dyn Channel) {
        self.pass(cx, id, below);
    }

    fn completed(&mut self, cx: &mut Cx, id: RequestId) {
        if cx.slab[id].op != Op::Read {
            return;
        }
        self.volatile.read_done(cx, id);
        if self.settings.corrupt && cx.slab[id].error == 0 {
            // If the filter also fails or hangs requests, the read was counted when it was passed
            // on.
            let is_counted = self.settings.error != 0 || self.settings.hang;
            let (choice, history) = (&self.settings.choice, &self.kind.history);
            corrupt::corrupt(choice, history, &cx.slab[id], is_counted);
        }
    }

    fn settled(&mut self, cx: &mut Cx, below: &mut dyn Channel) {
        self.volatile.settle(cx, below);
    }

    fn timer(&mut self, cx: &mut Cx, below: &mut dyn Channel) {
        if self.settings.refresh() && !self.settings.hang {
            for id in std::mem::take(&mut self.hanging) {
                self.store(cx, id, below);
            }
        }
        self.volatile.retry(cx, below);
    }

    fn drain(&mut self, cx: &mut Cx, _source: u16, _below: &mut dyn Channel) {
        let (stay, leaving) = std::mem::take(&mut self.hanging)
            .into_iter()
            .partition(|id| cx.may_wait(*id));
        self.hanging = stay;
        let leaving: Vec<_> = leaving;
        leaving
            .into_iter()
            .for_each(|id| cx.complete(id, libc::EIO));
    }
}
