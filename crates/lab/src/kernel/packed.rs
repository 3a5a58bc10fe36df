//! Extracts the kernel from a bzImage. The kernel is an ELF file that the image's first part
//! decompresses at boot, and that a machine can also boot directly.

use fathom_units::cause;
use std::io::Write;
use std::process::{Command, Stdio};

use crate::host;

/// Offset of the number of sectors of the real-mode part, without the first sector.
const SETUP_SECTORS: usize = 0x1f1;
/// Offset of the compressed kernel's offset behind the real-mode part, followed by its length. Both
/// exist since version 2.08 of the boot protocol (Documentation/arch/x86/boot.rst).
const PAYLOAD: usize = 0x248;
const MAGIC: (usize, &[u8]) = (0x202, b"HdrS");
const VERSION: usize = 0x206;
const SECTOR: usize = 512;
/// Size in bytes of the uncompressed length after the compressed kernel. gzip's own format has it,
/// so nothing follows it.
const LENGTH: usize = 4;

/// Magic bytes of the compression formats, and the programs that decompress them.
const PACKERS: &[(&[u8], &str)] = &[
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x02\x21\x4c\x18", "lz4"),
    (b"\x5d\0\0", "lzma"),
    (b"BZh", "bzip2"),
];

/// Returns the kernel's ELF file. The error is the reason why that is not possible.
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
        // The program may exit early; its exit status then decides.
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
        // An executable for x86-64, larger than the compressed image.
        assert_eq!((elf[4], elf[18]), (2, 62));
        assert!(elf.len() > image.len());
        // A truncated image is rejected.
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
