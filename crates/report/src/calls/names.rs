//! Names of the system calls of x86-64, including the arguments that distinguish their uses.

use std::borrow::Cow;

use syscalls::x86_64::Sysno;

/// `ioctl` and `futex`, the two calls whose second argument selects the operation.
const IOCTL: u64 = Sysno::ioctl as u64;
pub(crate) const FUTEX: u64 = Sysno::futex as u64;
/// futex2's wait; its first argument is also the address.
pub(crate) const FUTEX_WAIT: u64 = Sysno::futex_wait as u64;

/// Mask of the command; FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME are above it (linux/futex.h).
const FUTEX_COMMAND: u64 = 0x7f;

/// Requests to KVM that QEMU makes while a guest runs (linux/kvm.h, for x86).
const KVM_REQUESTS: &[(u64, &str)] = &[
    (0xae80, "ioctl(KVM_RUN)"),
    (0x4008_ae61, "ioctl(KVM_IRQ_LINE)"),
    (0xc008_ae67, "ioctl(KVM_IRQ_LINE_STATUS)"),
    (0x4020_aea5, "ioctl(KVM_SIGNAL_MSI)"),
    (0x4008_ae6a, "ioctl(KVM_SET_GSI_ROUTING)"),
    (0x4020_ae76, "ioctl(KVM_IRQFD)"),
    (0x4040_ae79, "ioctl(KVM_IOEVENTFD)"),
    (0x4010_ae42, "ioctl(KVM_GET_DIRTY_LOG)"),
];

/// Operations of futex (linux/futex.h), by command.
const FUTEX_COMMANDS: &[(u64, &str)] = &[
    (0, "futex(WAIT)"),
    (1, "futex(WAKE)"),
    (3, "futex(REQUEUE)"),
    (4, "futex(CMP_REQUEUE)"),
    (5, "futex(WAKE_OP)"),
    (6, "futex(LOCK_PI)"),
    (7, "futex(UNLOCK_PI)"),
    (8, "futex(TRYLOCK_PI)"),
    (9, "futex(WAIT_BITSET)"),
    (10, "futex(WAKE_BITSET)"),
    (11, "futex(WAIT_REQUEUE_PI)"),
    (12, "futex(CMP_REQUEUE_PI)"),
    (13, "futex(LOCK_PI2)"),
];

/// A system call as reports count it: its number, and the operation where that matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Call {
    nr: u32,
    /// Index into the number's table plus one; 0 if the table has no entry for the call.
    part: u32,
}

impl Call {
    /// Creates a call from its number and second argument.
    #[inline]
    pub(crate) fn new(nr: u64, arg1: u64) -> Call {
        let part = match nr {
            IOCTL => part(KVM_REQUESTS, arg1 & 0xffff_ffff),
            FUTEX => part(FUTEX_COMMANDS, arg1 & FUTEX_COMMAND),
            _ => 0,
        };
        let nr = u32::try_from(nr).unwrap_or(u32::MAX);
        Call { nr, part }
    }

    pub(crate) fn nr(self) -> u64 {
        self.nr.into()
    }

    /// Returns the name, such as `io_submit` or `ioctl(KVM_RUN)`; `syscall 999` if it has none.
    pub(crate) fn name(self) -> Cow<'static, str> {
        let table = if self.nr() == IOCTL {
            KVM_REQUESTS
        } else {
            FUTEX_COMMANDS
        };
        if self.part > 0 {
            return table[self.part as usize - 1].1.into();
        }
        match Sysno::new(self.nr as usize) {
            Some(sysno) => sysno.name().into(),
            None => format!("syscall {}", self.nr).into(),
        }
    }
}

fn part(table: &[(u64, &str)], value: u64) -> u32 {
    let index = table.iter().position(|(known, _)| *known == value);
    index.map_or(0, |index| index as u32 + 1)
}

/// Returns whether a call, given its number and second argument, waits at the address in its
/// first argument until another thread wakes it.
#[inline]
pub(crate) fn is_futex_wait(nr: u64, arg1: u64) -> bool {
    match nr {
        FUTEX => matches!(arg1 & FUTEX_COMMAND, 0 | 6 | 9 | 11 | 13),
        FUTEX_WAIT => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_their_names_of_x86_64() {
        for (nr, arg1, name) in [
            (0, 0, "read"),
            (17, 0, "pread64"),
            (209, 0, "io_submit"),
            (271, 0, "ppoll"),
            (426, 0, "io_uring_enter"),
            (16, 0xae80, "ioctl(KVM_RUN)"),
            (16, 0x5401, "ioctl"),
            (202, 128, "futex(WAIT)"),
            (202, 129, "futex(WAKE)"),
            (202, 128 | 256 | 9, "futex(WAIT_BITSET)"),
            (202, 99, "futex"),
            (100_000, 0, "syscall 100000"),
        ] {
            assert_eq!(Call::new(nr, arg1).name(), name);
        }
        assert!(is_futex_wait(202, 128) && is_futex_wait(202, 9 | 256) && is_futex_wait(455, 0));
        assert!(!is_futex_wait(202, 129) && !is_futex_wait(0, 0));
    }
}
