//! JSON output of `fathom img info`: QEMU's `ImageInfo`.

use super::{Info, compat, encryption, flag_names, foreign};
use crate::Image;
use crate::qcow2::snapshot::Snapshot;
use crate::qcow2::{COMPATIBLE_LAZY_REFCOUNTS, Header};
use serde_json::{Map, Value, json};

fn text(bytes: &[u8]) -> Value {
    String::from_utf8_lossy(bytes).into()
}

impl Info {
    /// Returns the fields of `qemu-img info --output=json`, by QEMU's names.
    pub fn to_json(&self) -> Value {
        let filename = self.path.display().to_string();
        let mut file = json!({
            "children": [],
            "virtual-size": self.file_len.next_multiple_of(512),
            "filename": filename,
            "format": self.protocol(),
        });
        if let Some(allocated) = self.allocated {
            file["actual-size"] = allocated.into();
            file["format-specific"] = json!({ "type": self.protocol(), "data": {} });
            file["dirty-flag"] = false.into();
        }
        let mut all = Map::new();
        let mut put = |key: &str, value: Value| all.insert(key.to_owned(), value);
        put("children", json!([{ "name": "file", "info": file }]));
        put("virtual-size", self.image.size().into());
        put("filename", filename.into());
        put("format", self.image.format().name().into());
        if let Some(allocated) = self.allocated {
            put("actual-size", allocated.into());
            put("dirty-flag", self.is_dirty().into());
        }
        if let Some(size) = self.cluster_size() {
            put("cluster-size", size.into());
        }
        if self.is_encrypted() {
            put("encrypted", true.into());
        }
        if let Some(name) = self.image.backing_file() {
            put("backing-filename", text(name));
            if let Some(full) = &self.full_backing {
                let full = full.display().to_string();
                put("full-backing-filename", full.into());
            }
        }
        if let Some(format) = self.image.backing_format() {
            put("backing-filename-format", format.into());
        }
        if let Some(mark) = &self.superseded {
            let (image, disk, time) = (&mark.image, &mark.disk, mark.time);
            put(
                "superseded",
                json!({ "image": image, "disk": disk, "time": time }),
            );
        }
        if !self.snapshots.is_empty() {
            put("snapshots", self.snapshots.iter().map(snapshot).collect());
        }
        if let Image::Qcow2(header) = &self.image {
            let data = self.specific(header);
            put("format-specific", json!({ "type": "qcow2", "data": data }));
        } else if let Image::Foreign(image) = &self.image {
            let (kind, data) = (image.kind.qemu_name(), foreign::to_json(image, &self.path));
            put("format-specific", json!({ "type": kind, "data": data }));
        } else if let Some(fields) = self.encryption() {
            let (format, data) = (self.image.format().name(), encryption::to_json(&fields));
            put("format-specific", json!({ "type": format, "data": data }));
        }
        Value::Object(all)
    }

    fn specific(&self, header: &Header) -> Value {
        let mut data = Map::new();
        let mut put = |key: &str, value: Value| data.insert(key.to_owned(), value);
        put("compat", compat(header).into());
        put("compression-type", header.compression.name().into());
        put("refcount-bits", header.geometry().refcount_bits().into());
        if header.version >= 3 {
            let lazy = header.compatible & COMPATIBLE_LAZY_REFCOUNTS != 0;
            put("lazy-refcounts", lazy.into());
            put("corrupt", header.is_corrupt().into());
            put("extended-l2", header.geometry().extended_l2.into());
        }
        if header.geometry().data_file {
            put("data-file-raw", header.data_file_is_raw().into());
            if let Some(name) = header.data_file() {
                put("data-file", text(name));
            }
        }
        if let Some(fields) = self.encryption() {
            put("encrypt", encryption::to_json(&fields).into());
        }
        if !self.bitmaps.is_empty() {
            let bitmap = |b| {
                let b: &crate::qcow2::bitmap::Bitmap = b;
                json!({
                    "name": text(&b.name),
                    "granularity": b.granularity(),
                    "flags": flag_names(b),
                })
            };
            put("bitmaps", self.bitmaps.iter().map(bitmap).collect());
        }
        Value::Object(data)
    }
}

pub(super) fn snapshot(snapshot: &Snapshot) -> Value {
    let mut value = json!({
        "id": text(&snapshot.id),
        "name": text(&snapshot.name),
        "vm-state-size": snapshot.vm_state_size(),
        "date-sec": snapshot.date.0,
        "date-nsec": snapshot.date.1,
        "vm-clock-sec": snapshot.vm_clock / 1_000_000_000,
        "vm-clock-nsec": snapshot.vm_clock % 1_000_000_000,
    });
    if let Some(icount) = snapshot.icount() {
        value["icount"] = icount.into();
    }
    value
}
