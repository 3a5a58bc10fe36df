//! Calculations shared by several rules. A share is a finite number from 0 to 1, or None, for any
//! values in the evidence.

use fathom_run::evidence::{Evidence, Load, ThreadRole, ThreadTime};

/// Share of the window from which a thread or a guest's CPU counts as busy. Below it, requests
/// queue for it for at most four times its service time (M/M/1 at 80 %).
pub const BUSY: f64 = 0.80;
/// Share that counts as the whole window; sampling and the window's edges account for the rest.
pub const SATURATED: f64 = 0.95;
/// Share of waiting for a CPU that lengthens a request noticeably; less is the scheduler's normal
/// work.
pub const DELAYED: f64 = 0.05;
/// Minimum gain if a suspected limiter were removed; trials (`--confirm`) require the same.
pub const GAIN: f64 = 1.15;
/// Minimum share of the offered requests that are in flight. A load with less is mostly busy with
/// something else, so the limit of its requests is not its own limit.
pub const KEPT: f64 = 0.50;
/// Maximum steal share that is used as a correction. Above it, the times of threads prove nothing.
const MOST_STOLEN: f64 = 0.50;
/// Maximum number of characters shown of a name from the evidence.
const NAME: usize = 40;

/// Returns `part / whole` if that is finite and not negative.
pub fn ratio(part: f64, whole: f64) -> Option<f64> {
    let makes_sense = part >= 0.0 && part.is_finite() && whole > 0.0 && whole.is_finite();
    let ratio = part / whole;
    (makes_sense && ratio.is_finite()).then_some(ratio)
}

/// Returns `part / whole`, at most 1, since counters and windows do not end at exactly the same
/// moment.
pub fn share(part: f64, whole: f64) -> Option<f64> {
    ratio(part, whole).map(|ratio| ratio.min(1.0))
}

/// Returns a thread's seconds as a share of the time in which it could work for the load.
pub fn of_window(evidence: &Evidence, thread: &ThreadTime, seconds: f64) -> Option<f64> {
    share(seconds, window(evidence, thread.role))
}

/// Returns the seconds in which threads of this role could work for the load.
///
/// Servers and the kernel's workers have nothing to do before the load starts and after its end, so
/// their window is the load's own. The other threads also start and end the load.
fn window(evidence: &Evidence, role: ThreadRole) -> f64 {
    use ThreadRole::{Io, Kernel, Load, Main, Other, Pool, Vcpu};
    match role {
        Io | Pool | Kernel => evidence.load_seconds().min(evidence.seconds),
        Load | Main | Other | Vcpu => evidence.seconds,
    }
}

/// Returns the share of the window in which a thread worked: its CPU time without unsuccessful
/// polling, in seconds per unstolen second. `None` if it polls and does not report for how long.
pub fn working(evidence: &Evidence, thread: &ThreadTime) -> Option<f64> {
    let seconds = window(evidence, thread.role);
    work_in(evidence, thread, seconds * (1.0 - stolen(evidence)))
}

/// Returns the same share of the whole window. A part of it may have been stolen.
pub fn worked(evidence: &Evidence, thread: &ThreadTime) -> Option<f64> {
    work_in(evidence, thread, window(evidence, thread.role))
}

fn work_in(evidence: &Evidence, thread: &ThreadTime, seconds: f64) -> Option<f64> {
    let useful = match thread.polls {
        true => thread.cpu - thread.polled?,
        false => thread.cpu,
    };
    let cpu = share(useful, seconds)?;
    if thread.polls {
        return Some(cpu);
    }
    // An idle vCPU may spin in the guest or in KVM (haltpoll), but the guest reports it as idle.
    match guest_cpu(evidence, thread) {
        Some(busy) if busy < BUSY => Some(busy.min(cpu)),
        _ => Some(cpu),
    }
}

/// Returns the working share plus short waits for a CPU, in which the thread had work, too. Long
/// waits have a rule of their own.
pub fn wanting(evidence: &Evidence, thread: &ThreadTime) -> Option<f64> {
    let working = working(evidence, thread)?;
    let waiting = thread.waiting;
    let waiting = waiting.and_then(|waits| of_window(evidence, thread, waits));
    match waiting {
        Some(waiting) if working >= BUSY => Some((working + waiting).min(1.0)),
        _ => Some(working),
    }
}

/// Returns the share of the host CPUs' runnable time that the host's own hypervisor withheld.
///
/// Kernels differ in whether a thread's CPU time includes steal time (paravirtual steal time). A
/// thread that never pauses therefore shows a CPU time between the unstolen part and the whole
/// window.
fn stolen(evidence: &Evidence) -> f64 {
    let sum = |percents: &[f64]| percents.iter().copied().sum::<f64>();
    let host = evidence.host.as_ref();
    let stolen = host.and_then(|host| {
        let steal = sum(&host.steal);
        share(steal, steal + sum(&host.busy))
    });
    stolen.unwrap_or(0.0).min(MOST_STOLEN)
}

/// Returns the share in which a vCPU ran its guest's work. Steal is no work: the vCPU waits for a
/// CPU of the host in that time.
fn guest_cpu(evidence: &Evidence, thread: &ThreadTime) -> Option<f64> {
    let guest = evidence.guest.as_ref()?;
    let number = usize::try_from(thread.vcpu?).ok()?;
    let busy = *guest.busy.get(number)?;
    share(busy, 100.0)
}

/// Returns true for roles of threads that handle the load's requests.
pub fn on_path(role: ThreadRole) -> bool {
    !matches!(role, ThreadRole::Kernel | ThreadRole::Other)
}

/// Returns the thread of these roles with the largest share, and that share.
pub fn largest(
    evidence: &Evidence,
    roles: impl Fn(ThreadRole) -> bool,
    share: impl Fn(&ThreadTime) -> Option<f64>,
) -> Option<(f64, &ThreadTime)> {
    let threads = evidence.threads.iter().filter(|one| roles(one.role));
    let shares = threads.filter_map(|one| Some((share(one)?, one)));
    shares.max_by(|one, other| one.0.total_cmp(&other.0))
}

/// Returns the number of requests that the load is configured to keep in flight. `None` if it is
/// not known.
pub fn offered(load: &Load) -> Option<f64> {
    let offered = f64::from(load.threads) * f64::from(load.depth);
    (offered > 0.0).then_some(offered)
}

/// Returns the number of requests that the load could keep in flight. A load that is known only
/// from its disk could keep one at least.
pub fn possible(load: &Load) -> Option<f64> {
    let is_of_disk = load.threads == 0 && load.depth == 0;
    offered(load).or(is_of_disk.then_some(1.0))
}

/// Returns the mean number of requests that the load had in flight, over its own seconds:
/// `requests * mean_ns / load_seconds` (Little's law).
pub fn load_in_flight(evidence: &Evidence) -> Option<f64> {
    let load = &evidence.load;
    let spent = load.requests as f64 * load.mean_ns / 1e9;
    ratio(spent, evidence.load_seconds()).filter(|_| load.requests > 0 && load.mean_ns > 0.0)
}

/// Formats a share: `98%`, or `5.3%` if it is small.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    let digits = usize::from(percent < 9.95);
    format!("{percent:.digits$}%")
}

/// Formats a number of requests: `31.8`, `32`.
pub fn number(value: f64) -> String {
    if value >= 1e12 {
        return format!("{value:.1e}");
    }
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// Formats a time in nanoseconds: `212 us`.
pub fn time(ns: f64) -> String {
    match ns {
        _ if ns < 1e3 => format!("{ns:.0} ns"),
        _ if ns < 1e4 => format!("{:.1} us", ns / 1e3),
        _ if ns < 1e6 => format!("{:.0} us", ns / 1e3),
        _ if ns < 1e9 => format!("{:.1} ms", ns / 1e6),
        _ => format!("{} s", number(ns / 1e9)),
    }
}

/// Returns a name from the evidence without control characters and shortened.
pub fn name(text: &str) -> String {
    let shown = text.chars().filter(|c| !c.is_control());
    shown.take(NAME).collect()
}

/// Describes a thread: `I/O thread 'io0'`.
pub fn thread(thread: &ThreadTime) -> String {
    let role = match thread.role {
        ThreadRole::Vcpu => "vCPU",
        ThreadRole::Main => "main loop",
        ThreadRole::Io => "I/O thread",
        ThreadRole::Pool => "pool thread",
        ThreadRole::Load => "load thread",
        ThreadRole::Kernel => "kernel thread",
        ThreadRole::Other => "thread",
    };
    format!("{role} '{}'", name(&thread.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_run::evidence::Processors;

    #[test]
    fn a_share_is_a_number_or_is_not_there() {
        assert_eq!(share(1.0, 4.0), Some(0.25));
        assert_eq!(share(5.0, 4.0), Some(1.0));
        for (part, whole) in [
            (f64::NAN, 1.0),
            (1.0, f64::NAN),
            (f64::INFINITY, 1.0),
            (1.0, f64::INFINITY),
            (1.0, 0.0),
            (-1.0, 1.0),
            (1.0, -1.0),
            (1e300, 1e-300),
        ] {
            assert_eq!(share(part, whole), None, "{part} / {whole}");
        }
    }

    #[test]
    fn a_poller_works_only_where_it_finds_something() {
        let evidence = Evidence {
            seconds: 10.0,
            ..Evidence::default()
        };
        let mut thread = ThreadTime {
            cpu: 9.9,
            ..ThreadTime::default()
        };
        assert_eq!(working(&evidence, &thread), Some(0.99));
        thread.polls = true;
        assert_eq!(working(&evidence, &thread), None);
        thread.polled = Some(8.9);
        assert!((working(&evidence, &thread).unwrap() - 0.1).abs() < 1e-9);
    }

    #[test]
    fn a_servers_window_is_the_loads_own() {
        let evidence = Evidence {
            seconds: 10.0,
            load: Load {
                seconds: 8.0,
                ..Load::default()
            },
            ..Evidence::default()
        };
        let mut thread = ThreadTime {
            role: ThreadRole::Io,
            cpu: 7.8,
            ..ThreadTime::default()
        };
        assert_eq!(working(&evidence, &thread), Some(0.975));
        thread.role = ThreadRole::Vcpu;
        assert_eq!(working(&evidence, &thread), Some(0.78));
    }

    #[test]
    fn what_is_stolen_from_the_host_is_no_pause_of_its_threads() {
        let mut evidence = Evidence {
            seconds: 10.0,
            ..Evidence::default()
        };
        let thread = ThreadTime {
            cpu: 8.0,
            ..ThreadTime::default()
        };
        evidence.host = Some(Processors {
            busy: vec![80.0, 0.0],
            steal: vec![20.0, 0.0],
        });
        assert_eq!(working(&evidence, &thread), Some(1.0));
        evidence.host.as_mut().unwrap().steal[0] = f64::NAN;
        assert_eq!(working(&evidence, &thread), Some(0.8));
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(percent(0.984), "98%");
        assert_eq!(percent(0.0534), "5.3%");
        assert_eq!(percent(1.0), "100%");
        assert_eq!((number(31.84), number(32.0)), ("31.8".into(), "32".into()));
        assert_eq!(number(1e300), "1.0e300");
        let times = [900.0, 2_120.0, 212_000.0, 3.44e6, 2.5e9].map(time);
        assert_eq!(times, ["900 ns", "2.1 us", "212 us", "3.4 ms", "2.5 s"]);
        assert_eq!(name("io\x1b[31m0\n"), "io[31m0");
        assert_eq!(name(&"x".repeat(1000)).len(), NAME);
    }
}
