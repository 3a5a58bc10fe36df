//! Human-readable output of `fathom img info`.

use super::{Info, Units, compat, encryption, flag_names, foreign};
use crate::Image;
use crate::qcow2::snapshot::Snapshot;
use crate::qcow2::{COMPATIBLE_LAZY_REFCOUNTS, Header};
use std::fmt::{self, Display, Formatter};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fn shown(bytes: &[u8]) -> String {
    crate::shown(&String::from_utf8_lossy(bytes))
}

fn shown_path(path: &Path) -> String {
    shown(path.as_os_str().as_bytes())
}

impl Display for Info {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (name, size) = (shown_path(&self.path), self.image.size());
        writeln!(f, "image: {name}")?;
        writeln!(f, "file format: {}", self.image.format())?;
        writeln!(f, "virtual size: {} ({size} bytes)", Units(size))?;
        let allocated = match self.allocated {
            Some(bytes) => Units(bytes).to_string(),
            None => "unavailable".to_owned(),
        };
        writeln!(f, "disk size: {allocated}")?;
        if self.is_encrypted() {
            writeln!(f, "encrypted: yes")?;
        }
        if let Some(size) = self.cluster_size() {
            writeln!(f, "cluster_size: {size}")?;
        }
        if self.is_dirty() {
            writeln!(f, "cleanly shut down: no")?;
        }
        if let Some(mark) = &self.superseded {
            let (image, disk) = (shown(mark.image.as_bytes()), shown(mark.disk.as_bytes()));
            writeln!(f, "superseded by: {image} (disk '{disk}')")?;
        }
        self.fmt_backing(f)?;
        if !self.snapshots.is_empty() {
            fmt_snapshots(f, &self.snapshots)?;
        }
        if let Image::Qcow2(header) = &self.image {
            self.fmt_specific(f, header)?;
        } else if let Image::Foreign(image) = &self.image {
            writeln!(f, "Format specific information:")?;
            foreign::fmt(f, &foreign::to_json(image, &self.path), 4)?;
        } else if let Some(fields) = self.encryption() {
            writeln!(f, "Format specific information:")?;
            encryption::fmt(f, &fields, 4)?;
        }
        writeln!(f, "Child node '/file':")?;
        writeln!(f, "    filename: {name}")?;
        writeln!(f, "    protocol type: {}", self.protocol())?;
        let len = self.file_len.next_multiple_of(512);
        writeln!(f, "    file length: {} ({len} bytes)", Units(len))?;
        writeln!(f, "    disk size: {allocated}")
    }
}

impl Info {
    fn fmt_backing(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(name) = self.image.backing_file() else {
            return Ok(());
        };
        let name = shown(name);
        write!(f, "backing file: {name}")?;
        match &self.full_backing {
            None => write!(f, " (cannot determine actual path)")?,
            Some(full) if shown_path(full) != name => {
                write!(f, " (actual path: {})", shown_path(full))?;
            }
            Some(_) => {}
        }
        writeln!(f)?;
        if let Some(format) = self.image.backing_format() {
            writeln!(f, "backing file format: {}", shown(format.as_bytes()))?;
        }
        Ok(())
    }

    fn fmt_specific(&self, f: &mut Formatter<'_>, header: &Header) -> fmt::Result {
        writeln!(f, "Format specific information:")?;
        writeln!(f, "    compat: {}", compat(header))?;
        writeln!(f, "    compression type: {}", header.compression.name())?;
        if header.version >= 3 {
            let lazy = header.compatible & COMPATIBLE_LAZY_REFCOUNTS != 0;
            writeln!(f, "    lazy refcounts: {lazy}")?;
        }
        if !self.bitmaps.is_empty() {
            self.fmt_bitmaps(f)?;
        }
        writeln!(
            f,
            "    refcount bits: {}",
            header.geometry().refcount_bits()
        )?;
        if let Some(fields) = self.encryption() {
            writeln!(f, "    encrypt:")?;
            encryption::fmt(f, &fields, 8)?;
        }
        if header.geometry().data_file {
            if let Some(name) = header.data_file() {
                writeln!(f, "    data file: {}", shown(name))?;
            }
            writeln!(f, "    data file raw: {}", header.data_file_is_raw())?;
        }
        if header.version >= 3 {
            writeln!(f, "    corrupt: {}", header.is_corrupt())?;
            writeln!(f, "    extended l2: {}", header.geometry().extended_l2)?;
        }
        Ok(())
    }

    fn fmt_bitmaps(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "    bitmaps:")?;
        for (i, bitmap) in self.bitmaps.iter().enumerate() {
            writeln!(f, "        [{i}]:\n            flags:")?;
            for (i, flag) in flag_names(bitmap).iter().enumerate() {
                writeln!(f, "                [{i}]: {flag}")?;
            }
            writeln!(f, "            name: {}", shown(&bitmap.name))?;
            writeln!(f, "            granularity: {}", bitmap.granularity())?;
        }
        Ok(())
    }
}

pub(super) fn fmt_snapshots(f: &mut Formatter<'_>, snapshots: &[Snapshot]) -> fmt::Result {
    writeln!(f, "Snapshot list:")?;
    let mut row = |id: &str, tag: &str, size: &str, date: &str, clock: &str, icount: &str| {
        writeln!(
            f,
            "{id:<7} {tag:<16} {size:>8} {date:>19} {clock:>15} {icount:>10}"
        )
    };
    row("ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT")?;
    for snapshot in snapshots {
        let icount = snapshot.icount().map(|n| n.to_string());
        row(
            &shown(&snapshot.id),
            &shown(&snapshot.name),
            &Units(snapshot.vm_state_size()).to_string(),
            &local_time(snapshot.date.0),
            &clock(snapshot.vm_clock),
            icount.as_deref().unwrap_or("--"),
        )?;
    }
    Ok(())
}

/// Formats the guest's run time as hours, minutes, seconds and milliseconds.
fn clock(nanoseconds: u64) -> String {
    let ms = nanoseconds / 1_000_000;
    let (s, ms) = (ms / 1000, ms % 1000);
    let (h, m, s) = (s / 3600, s / 60 % 60, s % 60);
    format!("{h:04}:{m:02}:{s:02}.{ms:03}")
}

/// Formats seconds since the epoch as a date in the local time zone.
fn local_time(seconds: u32) -> String {
    let time = seconds.into();
    // SAFETY: a tm of zeroes is valid; its pointer member may be null.
    let mut tm: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: reads one time_t, writes one tm, and keeps neither.
    let converted = unsafe { libc::localtime_r(&time, &mut tm) };
    if converted.is_null() {
        return seconds.to_string();
    }
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        tm.tm_year + 1900,
        tm.tm_mon + 1,
        tm.tm_mday,
        tm.tm_hour,
        tm.tm_min,
        tm.tm_sec
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_look_like_those_of_qemu_img() {
        assert_eq!(clock(0), "0000:00:00.000");
        assert_eq!(clock(3_723_004_999_999), "0001:02:03.004");
    }
}
