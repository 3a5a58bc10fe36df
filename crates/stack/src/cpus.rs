//! CPU lists of workers.

use std::fmt;
use std::fs;
use std::str::FromStr;

/// CPU numbers as taskset(1) writes them: `0`, `2-5`, `0,4-7`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuList(Vec<usize>);

impl CpuList {
    /// Returns the CPUs of worker number `worker` of `workers`.
    ///
    /// Each CPU belongs to one worker if there are enough CPUs; otherwise workers share CPUs.
    pub fn share(&self, worker: usize, workers: usize) -> Vec<usize> {
        let CpuList(cpus) = self;
        if cpus.len() < workers {
            let turn = cpus.iter().cycle().nth(worker);
            return turn.copied().into_iter().collect();
        }
        cpus.iter().skip(worker).step_by(workers).copied().collect()
    }

    /// Rejects CPUs that this machine does not have.
    ///
    /// If the list of CPUs cannot be read, the kernel rejects them later.
    pub(crate) fn check(&self) -> Result<(), String> {
        let text = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
        let text = text.trim_end();
        let Ok(online) = text.parse::<CpuList>() else {
            return Ok(());
        };
        match self.first_not_in(&online) {
            None => Ok(()),
            Some(cpu) => Err(format!(
                "--cpus: CPU {cpu} does not exist; this machine has CPUs {text}"
            )),
        }
    }

    /// Returns a CPU that the other list does not contain.
    fn first_not_in(&self, other: &CpuList) -> Option<usize> {
        let mut cpus = self.0.iter().copied();
        cpus.find(|cpu| !other.0.contains(cpu))
    }
}

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<CpuList, String> {
        let bad = || format!("'{text}' is not a list of CPUs such as 0,2-3");
        // The CPUs that fit into the cpu_set_t of sched_setaffinity(2).
        let cpu = |number: &str| number.parse().ok().filter(|cpu: &usize| *cpu < 1024);
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            match (cpu(first), cpu(last)) {
                (Some(first), Some(last)) if first <= last => cpus.extend(first..=last),
                _ => return Err(bad()),
            }
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(CpuList(cpus))
    }
}

/// Formats the list so that it can be parsed again, without ranges.
impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<_> = self.0.iter().map(usize::to_string).collect();
        f.write_str(&numbers.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_listed_like_taskset() {
        let parse = |text: &str| text.parse().map(|CpuList(cpus)| cpus);
        assert_eq!(parse("3"), Ok(vec![3]));
        assert_eq!("4-6,0".parse::<CpuList>().unwrap().to_string(), "0,4,5,6");
        assert_eq!(parse("4-6,0,5"), Ok(vec![0, 4, 5, 6]));
        for bad in ["", ",", "1-", "3-1", "a", "-1", "1024", "0-99999999"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_worker_gets_its_share_of_the_cpus() {
        let shares = |list: &str, n| {
            let list: CpuList = list.parse().unwrap();
            (0..n).map(|i| list.share(i, n)).collect::<Vec<_>>()
        };
        assert_eq!(shares("1-4", 2), [vec![1, 3], vec![2, 4]]);
        assert_eq!(shares("1-2", 3), [vec![1], vec![2], vec![1]]);
        assert_eq!(CpuList::default().share(1, 2), [0; 0]);
    }
}
