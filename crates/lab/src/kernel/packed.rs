//! The kernel within a bzImage: an ELF file that its first part unpacks when it boots, and that a
//! machine may get unpacked beforehand.

use fathom_units::cause;
use std::io::Write;
use std::process::{Command, Stdio};

use crate::host;

/// Where a bzImage says how many sectors its real-mode part has, but for the first one.
const SETUP_SECTORS: usize = 0x1f1;
/// Where it says of the packed kernel at which offset behind that part it begins, and its length; since
/// version 2.08 of the boot protocol (Documentation/arch/x86/boot.rst).
const PAYLOAD: usize = 0x248;
const MAGIC: (usize, &[u8]) = (0x202, b"HdrS");
const VERSION: usize = 0x206;
const SECTOR: usize = 512;
/// Behind what is packed stands its unpacked length, but not behind gzip's, which has its own.
const LENGTH: usize = 4;

/// First bytes of what is packed, and who unpacks it.
const PACKERS: &[(&[u8], &str)] = &[
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x02\x21\x4c\x18", "lz4"),
    (b"\x5d\0\0", "lzma"),
    (b"BZh", "bzip2"),
];

/// The kernel's ELF file; the error says why it cannot be had.
pub(super) fn unpack(image: &[u8]) -> Result<Vec<u8>, String> {
    let packed = payload(image).ok_or("not a bzImage with the offset of its kernel")?;
    let (magic, program) = { PACKERS.iter() }
        .find(|(magic, _)| packed.starts_with(magic))
        .ok_or("the compression of its kernel is unknown")?;
    let end = match *magic {
        b"\x1f\x8b" => packed.len(),
        _ => packed.len().saturating_sub(LENGTH),
    };
    let program = host::program(program).map_err(|error| error.to_string())?;
    let mut child = Command::new(&program)
        .args(["-d", "-c"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("cannot run {}: {}", program.display(), cause(error)))?;
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        // It may end early: what it says then is what counts.
        scope.spawn(move || stdin.map(|mut pipe| pipe.write_all(&packed[..end])));
        child.wait_with_output()
    });
    match output {
        Ok(output) if output.status.success() && output.stdout.starts_with(b"\x7fELF") => {
            Ok(output.stdout)
        }
        _ => Err(format!("{} cannot unpack its kernel", program.display())),
    }
}

fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| Some(u32::from_le_bytes(*image.get(at..)?.first_chunk()?) as usize);
    let version = u16::from_le_bytes(*image.get(VERSION..)?.first_chunk()?);
    let is_known = image.get(MAGIC.0..)?.starts_with(MAGIC.1) && version >= 0x208;
    let setup = (usize::from(*image.get(SETUP_SECTORS)?) + 1) * SECTOR;
    let begin = setup.checked_add(word(PAYLOAD)?)?;
    let end = begin.checked_add(word(PAYLOAD + 4)?)?;
    image.get(begin..end).filter(|_| is_known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernel;

    #[test]
    fn the_machines_own_kernel_is_unpacked() {
        let image = std::fs::read(Kernel::find().unwrap().image).unwrap();
        let elf = unpack(&image).unwrap();
        // An executable for x86-64, larger than what it was packed into.
        assert_eq!((elf[4], elf[18]), (2, 62));
        assert!(elf.len() > image.len());
        // Cut off, it is none.
        assert!(unpack(&image[..image.len() / 2]).is_err());
    }

    #[test]
    fn what_is_no_image_is_refused() {
        let mut image = vec![0; 4096];
        assert!(unpack(&image).is_err());
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206] = 0xf;
        image[0x207] = 2;
        image[0x248..0x250].fill(0xff);
        assert!(unpack(&image).unwrap_err().contains("not a bzImage"));
        image[0x248..0x250].copy_from_slice(&[0, 1, 0, 0, 16, 0, 0, 0]);
        assert!(
            unpack(&image)
                .unwrap_err()
                .contains("compression of its kernel is unknown")
        );
    }
}
