//! Addresses of AF_VSOCK sockets, which rustix does not support.

use rustix::net::SocketAddrAny;
use rustix::net::addr::{SocketAddrArg, SocketAddrLen, SocketAddrOpaque};
use std::fmt;

/// CID for listening at any CID of this machine.
pub const ANY_CID: u32 = libc::VMADDR_CID_ANY;

/// An AF_VSOCK address, displayed as `CID:PORT`.
pub struct VsockAddr(libc::sockaddr_vm);

impl VsockAddr {
    /// Creates the address of a port of the machine `cid`, or of any CID if `cid` is [`ANY_CID`].
    pub fn new(cid: u32, port: u32) -> VsockAddr {
        // SAFETY: the structure contains only numbers, for which zero is valid.
        let mut addr: libc::sockaddr_vm = unsafe { std::mem::zeroed() };
        addr.svm_family = libc::AF_VSOCK as libc::sa_family_t;
        addr.svm_cid = cid;
        addr.svm_port = port;
        VsockAddr(addr)
    }

    /// Returns the CID, which identifies a virtual machine or the host.
    pub fn cid(&self) -> u32 {
        self.0.svm_cid
    }

    /// Converts `any`, whose family must be AF_VSOCK.
    pub fn from_any(any: &SocketAddrAny) -> VsockAddr {
        let mut addr = VsockAddr::new(0, 0);
        let len = size_of_val(&addr.0).min(any.addr_len() as usize);
        // SAFETY: both sides have at least `len` bytes, and any bytes are a valid sockaddr_vm.
        unsafe {
            let from = any.as_ptr().cast::<u8>();
            std::ptr::copy_nonoverlapping(from, (&raw mut addr.0).cast::<u8>(), len);
        }
        addr
    }
}

impl fmt::Display for VsockAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.svm_cid {
            ANY_CID => write!(f, "any:{}", self.0.svm_port),
            cid => write!(f, "{cid}:{}", self.0.svm_port),
        }
    }
}

// SAFETY: `with_sockaddr` passes a pointer to a whole sockaddr_vm with its length.
unsafe impl SocketAddrArg for VsockAddr {
    unsafe fn with_sockaddr<R>(
        &self,
        f: impl FnOnce(*const SocketAddrOpaque, SocketAddrLen) -> R,
    ) -> R {
        f((&raw const self.0).cast(), size_of_val(&self.0) as u32)
    }
}
