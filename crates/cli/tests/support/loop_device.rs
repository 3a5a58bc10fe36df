//! Loop devices, which need root.

use super::as_arg;
use super::nbd::tool;
use std::path::Path;

/// A loop device on a file, detached when dropped.
pub struct Loop(pub String);

impl Loop {
    pub fn of(file: &Path) -> Loop {
        let args = ["--find", "--show", &as_arg(file)];
        let made = tool(Path::new("/"), "losetup", &args);
        assert!(made.status.success(), "{made:?}");
        Loop(String::from_utf8_lossy(&made.stdout).trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        tool(Path::new("/"), "losetup", &["--detach", &self.0]);
    }
}
