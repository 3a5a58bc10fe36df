//! Fuzz targets that open arbitrary bytes as images.

use crate::{Bytes, Image, Kind, Place, Start};

/// Number of extents after which [`walk`] continues in larger steps.
const MAX_EXTENTS: u64 = 4096;
/// Maximum number of grains that [`walk`] decompresses.
const MAX_GRAINS: u32 = 64;

/// Opens `data` as an image of each format and looks up all of it.
///
/// For an image in several files, zero bytes separate the descriptor and the contents of its files.
pub fn image(data: &[u8]) {
    let main = data.to_vec();
    let pieces: Vec<Vec<u8>> = data.split(|&byte| byte == 0).map(<[u8]>::to_vec).collect();
    for kind in Kind::ALL {
        let Ok(start) = Start::read(kind, &main) else {
            continue;
        };
        for name in start.names() {
            assert!(!name.contains(['/', '\\', '\0']) && !name.contains(".."));
        }
        // Each file is one of the pieces; the last file, if there are enough of them, is all of
        // `data`.
        let all = [&pieces[..], std::slice::from_ref(&main)].concat();
        let names = start.names().len();
        let parts: Vec<Vec<u8>> = all.iter().cycle().skip(1).take(names).cloned().collect();
        if let Ok(image) = start.open(&main, &parts) {
            let mut files: Vec<&dyn Bytes> = vec![&main];
            files.extend(parts.iter().map(|part| part as &dyn Bytes));
            walk(&image, &files);
        }
    }
}

/// Looks up all of an image, or many parts of a large one, and panics if a guarantee is violated.
///
/// `files` must be the files with which the image was opened.
pub fn walk(image: &Image, files: &[&dyn Bytes]) {
    let description = image.describe();
    assert_eq!(description.size, image.size());
    let (size, mut offset, mut extents, mut grains) = (image.size(), 0, 0, 0);
    while offset < size {
        let extent = image.lookup(offset, size - offset);
        assert!(extent.len > 0 && extent.len <= size - offset);
        match extent.place {
            Place::Zero => {}
            Place::Data { file, at } => {
                let len = files[file].len().expect("a length");
                assert!(at.checked_add(extent.len).is_some_and(|end| end <= len));
            }
            Place::Compressed(grain) => {
                let len = files[grain.file].len().expect("a length");
                assert!(
                    grain
                        .at
                        .checked_add(grain.len)
                        .is_some_and(|end| end <= len)
                );
                assert!(grain.skip + extent.len <= grain.size && grain.len <= 2 * grain.size);
                grains += 1;
                if grains <= MAX_GRAINS {
                    let mut stored = vec![0; grain.len as usize];
                    let read = files[grain.file].read_at(&mut stored, grain.at);
                    read.expect("bytes that are there");
                    let _ = grain.inflate(&stored, &mut vec![0; grain.size as usize]);
                }
            }
        }
        // A lookup from the middle of the extent must return the same location.
        let middle = extent.len / 2;
        let again = image.lookup(offset + middle, extent.len - middle);
        assert!(again.len > 0 && again.len <= extent.len - middle);
        match (extent.place, again.place) {
            (Place::Zero, Place::Zero) => {}
            (Place::Data { file, at }, Place::Data { file: same, at: on }) => {
                assert!(file == same && at + middle == on);
            }
            (Place::Compressed(one), Place::Compressed(other)) => {
                assert!(one.at == other.at && one.skip + middle == other.skip);
            }
            (one, other) => panic!("{one:?} goes on as {other:?}"),
        }
        extents += 1;
        offset += match extents < MAX_EXTENTS {
            true => extent.len,
            false => extent.len.max(size / MAX_EXTENTS).min(size - offset),
        };
    }
    assert_eq!(image.lookup(size, 1).len, 0);
    assert_eq!(image.lookup(0, 0).len, 0);
}
