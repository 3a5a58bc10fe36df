//! Compiles lists of system calls to seccomp programs for the kernel.

use crate::Mode;
use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, sock_filter,
};
use std::collections::BTreeMap;

/// The last system call that the lists know: file_setattr(2) of Linux 6.17, on all architectures.
///
/// Newer calls fail with ENOSYS, as on an older kernel. Libraries are prepared for this error.
const LAST_KNOWN: u32 = 469;

/// First number of the x32 ABI, which has the same calls under other numbers.
#[cfg(target_arch = "x86_64")]
const X32: u32 = 0x4000_0000;

#[cfg(target_arch = "x86_64")]
const ARCH: TargetArch = TargetArch::x86_64;
#[cfg(target_arch = "aarch64")]
const ARCH: TargetArch = TargetArch::aarch64;

/// Number of instructions before the first comparison: they check the architecture and load the
/// number of the call.
const PROLOGUE: usize = 4;

/// System calls by number. A call matches always, or if one of several rules holds.
#[derive(Clone, Default)]
pub(crate) struct Calls(BTreeMap<c_long, Vec<SeccompRule>>);

impl Calls {
    /// Adds calls with any arguments.
    pub(crate) fn any(mut self, calls: &[c_long]) -> Calls {
        for call in calls {
            self.0.insert(*call, Vec::new());
        }
        self
    }

    /// Adds a call if `test` holds for argument number `arg`.
    pub(crate) fn only(self, call: c_long, arg: u8, test: Test) -> Calls {
        self.if_all(call, &[(arg, test)])
    }

    /// Adds a call if argument number `arg` has one of these values.
    pub(crate) fn one_of(self, call: c_long, arg: u8, values: &[u64]) -> Calls {
        let each = |calls: Calls, value: &u64| calls.only(call, arg, Test::Is(*value));
        values.iter().fold(self, each)
    }

    pub(crate) fn if_all(mut self, call: c_long, tests: &[(u8, Test)]) -> Calls {
        let conditions = tests.iter().map(|(arg, test)| test.of(*arg));
        let rule = SeccompRule::new(conditions.collect());
        let rule = rule.expect("there are conditions");
        match self.0.get_mut(&call) {
            // The call is already in the list without a condition.
            Some(rules) if rules.is_empty() => {}
            Some(rules) => rules.push(rule),
            None => drop(self.0.insert(call, vec![rule])),
        }
        self
    }

    /// Merges both lists.
    pub(crate) fn and(mut self, other: Calls) -> Calls {
        for (call, rules) in other.0 {
            match self.0.get_mut(&call) {
                Some(mine) if mine.is_empty() || rules.is_empty() => mine.clear(),
                Some(mine) => mine.extend(rules),
                None => drop(self.0.insert(call, rules)),
            }
        }
        self
    }
}

/// A test of the lower 32 bits of an argument; flags, commands and descriptors have no more.
#[derive(Clone, Copy)]
pub(crate) enum Test {
    Is(u64),
    /// None of these bits is set.
    None(u64),
    /// All of these bits are set.
    All(u64),
}

impl Test {
    fn of(self, arg: u8) -> SeccompCondition {
        let (op, value) = match self {
            Test::Is(value) => (SeccompCmpOp::Eq, value),
            Test::None(bits) => (SeccompCmpOp::MaskedEq(bits), 0),
            Test::All(bits) => (SeccompCmpOp::MaskedEq(bits), bits),
        };
        let condition = SeccompCondition::new(arg, SeccompCmpArgLen::Dword, op, value);
        condition.expect("system calls have six arguments")
    }
}

/// Policy of a filter.
pub(crate) enum Filter {
    /// Allows only these calls.
    Allow(Calls),
    /// Allows all calls but these.
    Deny(Calls),
}

/// A call that fails with this errno, without ending the process.
#[derive(Clone, Copy)]
pub(crate) struct Refused(pub(crate) c_long, pub(crate) i32);

/// Compiles a filter to a program.
///
/// The program compares `hot` calls first. An x86 kernel caches which calls a filter always allows,
/// and does not run the filter for them. Other architectures do run it.
pub(crate) fn compile(
    filter: Filter,
    refused: &[Refused],
    hot: &[c_long],
    mode: Mode,
) -> Result<BpfProgram, String> {
    let bad = match mode {
        Mode::On => SeccompAction::KillProcess,
        _ => SeccompAction::Log,
    };
    let is_list = matches!(filter, Filter::Allow(_));
    let (mut calls, otherwise, found) = match filter {
        Filter::Allow(calls) => (calls, bad.clone(), SeccompAction::Allow),
        Filter::Deny(calls) => (calls, SeccompAction::Allow, bad.clone()),
    };
    let hot: &[c_long] = if is_list { hot } else { &[] };
    let mut first = Vec::new();
    for call in hot {
        if calls.0.get(call).is_some_and(Vec::is_empty) {
            first.extend(when(JEQ, *call as u32, SeccompAction::Allow));
        }
    }
    #[cfg(target_arch = "x86_64")]
    first.extend(when(JGE, X32, bad));
    if mode == Mode::On {
        let absent = SeccompAction::Errno(libc::ENOSYS as u32);
        first.extend(when(JGT, LAST_KNOWN, absent));
        for Refused(call, errno) in refused {
            let action = SeccompAction::Errno(*errno as u32);
            first.extend(when(JEQ, *call as u32, action));
        }
    } else if is_list {
        calls = refused.iter().fold(calls, |all, r| all.any(&[r.0]));
    }
    let filter = SeccompFilter::new(calls.0, otherwise, found, ARCH).map_err(|e| e.to_string())?;
    let mut program = BpfProgram::try_from(filter).map_err(|e| e.to_string())?;
    program.splice(PROLOGUE..PROLOGUE, first);
    Ok(program)
}

// From linux/bpf_common.h: BPF_JMP | BPF_K with a comparison, and BPF_RET | BPF_K.
const JEQ: u16 = 0x15;
const JGT: u16 = 0x25;
const JGE: u16 = 0x35;
const RET: u16 = 0x06;

/// Returns instructions that take `action` if the number of the call satisfies the comparison.
fn when(comparison: u16, value: u32, action: SeccompAction) -> [sock_filter; 2] {
    let instruction = |code, jf, k| sock_filter { code, jt: 0, jf, k };
    [
        instruction(comparison, 1, value),
        instruction(RET, 0, action.into()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules_of(calls: &Calls, call: c_long) -> usize {
        calls.0.get(&call).map_or(usize::MAX, Vec::len)
    }

    #[test]
    fn a_call_without_conditions_is_not_narrowed() {
        let narrow = || Calls::default().one_of(libc::SYS_fcntl, 1, &[1, 2]);
        let wide = || Calls::default().any(&[libc::SYS_fcntl]);
        assert_eq!(rules_of(&narrow(), libc::SYS_fcntl), 2);
        for calls in [
            narrow().and(wide()),
            wide().and(narrow()),
            wide().only(libc::SYS_fcntl, 1, Test::Is(3)),
        ] {
            assert_eq!(rules_of(&calls, libc::SYS_fcntl), 0);
        }
        let both = narrow().and(Calls::default().one_of(libc::SYS_fcntl, 1, &[3]));
        assert_eq!(rules_of(&both, libc::SYS_fcntl), 3);
    }

    #[test]
    fn what_is_put_in_comes_right_after_the_number_is_known() {
        let calls = Calls::default().any(&[libc::SYS_read]);
        let program = compile(Filter::Allow(calls), &[], &[libc::SYS_read], Mode::On).unwrap();
        // BPF_LD | BPF_W | BPF_ABS of the first word.
        assert_eq!(
            (program[PROLOGUE - 1].code, program[PROLOGUE - 1].k),
            (0x20, 0)
        );
        assert_eq!(program[PROLOGUE].k, libc::SYS_read as u32);
    }
}
