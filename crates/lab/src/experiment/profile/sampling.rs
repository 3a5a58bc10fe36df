//! Sampling of CPUs.

use super::fold;
use crate::perf::Recording;
use crate::words::words;

words! {
    /// Whether a sample includes its callers.
    pub enum CallGraph {
        /// By frame pointers.
        Fp = "fp",
        None = "none",
    }
}

/// How CPUs are sampled.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Samples per second of each CPU.
    pub frequency: u32,
    pub graph: CallGraph,
}

impl Sampling {
    /// Returns how perf records. The CPU clock works on every machine, also without performance
    /// counters. `GH` samples a CPU also while it runs a guest's instructions.
    pub fn recording(self) -> Recording {
        let mut words = vec![
            "--event=cpu-clock:GH".to_owned(),
            format!("-F{}", self.frequency),
        ];
        if self.graph == CallGraph::Fp {
            words.push("--call-graph=fp".into());
        }
        Recording {
            name: "samples",
            words,
            fields: fold::FIELDS,
            with_tasks: false,
            most: ["1G", "96M"],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::fold::Folder;
    use super::*;
    use crate::perf::{Modules, OnHost};
    use rustix::time::{ClockId, clock_gettime};

    /// The reference is what a thread of this program is known to do.
    #[test]
    fn a_busy_thread_is_seen_with_its_name_and_function() {
        #[inline(never)]
        fn spin_in_a_function_of_its_own(until: Instant) -> f64 {
            let mut turns = 0_u64;
            while Instant::now() < until {
                for _ in 0..10_000 {
                    turns = std::hint::black_box(turns + 1);
                }
            }
            let spent = clock_gettime(ClockId::ThreadCPUTime);
            spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9
        }
        let dir = tempfile::tempdir().unwrap();
        let sampling = Sampling {
            frequency: 499,
            graph: CallGraph::Fp,
        };
        let perf = OnHost::start(dir.path(), &sampling.recording())
            .unwrap_or_else(|error| panic!("this test samples the CPUs: {error}"));
        let until = Instant::now() + Duration::from_secs(1);
        let spin = move || spin_in_a_function_of_its_own(until);
        let thread = std::thread::Builder::new().name("busy one".into());
        let spent = thread.spawn(spin).unwrap().join().unwrap();
        let known = vec![(std::process::id(), "server: ")];
        let mut folder = Folder::new(known, Modules::of_host());
        let missing = perf.stop().unwrap().print(&mut |chunk| folder.push(chunk));
        assert_eq!(missing.unwrap(), None);
        let folded = folder.finish();
        let lines = folded.lines();
        let seen = lines.iter().filter(|line| {
            line.starts_with("server: busy one;") && line.contains("spin_in_a_function_of_its_own")
        });
        let seen: f64 = seen
            .map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap())
            .sum();
        let wanted = spent * f64::from(sampling.frequency);
        // Some samples may be late if other programs use the CPUs, too.
        let range = wanted * 0.5 - 5.0..wanted * 1.3 + 5.0;
        assert!(range.contains(&seen), "{seen}, not {wanted}: {lines:#?}");
    }
}
