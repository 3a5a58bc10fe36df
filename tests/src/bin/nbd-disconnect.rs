//! Makes the kernel's NBD client send NBD_CMD_DISC, and nothing more.
//!
//! In contrast, `nbd-client -d` also makes it give up the requests in flight.

use std::fs::File;
use std::os::fd::AsRawFd;

/// linux/nbd.h: _IO(0xab, 8).
const NBD_DISCONNECT: libc::Ioctl = libc::_IO(0xab, 8);

fn main() -> std::io::Result<()> {
    let path = std::env::args().nth(1).expect("a device");
    let device = File::open(path)?;
    // SAFETY: this ioctl has no argument.
    match unsafe { libc::ioctl(device.as_raw_fd(), NBD_DISCONNECT) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
