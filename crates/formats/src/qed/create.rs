//! Creates QED images: the header in the first cluster, then the L1 table.

use super::{FEATURE_BACKING_FILE, FEATURE_BACKING_FORMAT_NO_PROBE, HEADER_LEN, Header};
use crate::offline::create::{Options, Preallocation, empty, preallocate};
use crate::{Error, Format, HostOffset, Result};
use fathom_files::ImageFile;

pub(super) fn create(file: &dyn ImageFile, options: &Options, size: u64) -> Result<()> {
    let mut header = Header {
        cluster_size: options.cluster_size as u32,
        table_size: options.table_size as u32,
        header_size: 1,
        features: 0,
        compat_features: 0,
        autoclear_features: 0,
        l1_offset: HostOffset(options.cluster_size),
        image_size: size,
        backing_offset: 0,
        backing_len: 0,
    };
    let mut name = Vec::new();
    if let Some(backing) = &options.backing {
        name = backing.name.clone().into_bytes();
        header.features |= FEATURE_BACKING_FILE;
        if backing.format == Some(Format::Raw) {
            header.features |= FEATURE_BACKING_FORMAT_NO_PROBE;
        }
        header.backing_offset = HEADER_LEN as u32;
        header.backing_len = name.len() as u32;
    }
    let mut start = header.encode().to_vec();
    start.extend(&name);
    // Fails if the size is too large, for example.
    Header::parse(&start).map_err(|e| Error::usage(e.to_string()))?;
    let failed = || Error::io("cannot write the image");
    let geometry = header.geometry();
    empty(file)?;
    let start_of_l1 = header.l1_offset.0;
    file.set_len(start_of_l1 + geometry.table_bytes())
        .map_err(failed())?;
    // A file would have a hole here, but a device needs the zeroes.
    preallocate(
        file,
        Preallocation::Full,
        start_of_l1,
        geometry.table_bytes(),
    )?;
    file.sync().map_err(Error::io("cannot flush"))?;
    file.write_at(&start, 0).map_err(failed())?;
    file.sync().map_err(Error::io("cannot flush"))
}
