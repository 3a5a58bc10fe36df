//! perf counters, one per thread.

use std::io;

use perf_event::{Builder, CountAndTime, Counter};

/// Maximum number of threads that are counted at once. Each takes a file descriptor.
const MAX_THREADS: usize = 256;

/// Counts one event in all of its threads, and in the threads that these start.
pub struct Counters(Vec<Counter>);

impl Counters {
    /// Starts to count the builder's event. Returns `None` if none of the threads exists.
    ///
    /// # Errors
    /// When the kernel does not support the event, or this process may not count it.
    pub fn begin(
        event: &mut Builder,
        threads: impl Iterator<Item = u32>,
    ) -> io::Result<Option<Counters>> {
        let mut counters = Vec::new();
        for thread in threads.take(MAX_THREADS) {
            event.observe_pid(thread as i32).inherit(true);
            match event.enabled(true).build() {
                Ok(counter) => counters.push(counter),
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(error) => return Err(error),
            }
        }
        Ok((!counters.is_empty()).then_some(Counters(counters)))
    }

    /// Returns the count so far.
    ///
    /// # Errors
    /// Those of `read(2)`.
    pub fn counted(&mut self) -> io::Result<u64> {
        let counts = self.0.iter_mut().map(Counter::read_count_and_time);
        counts.map(|count| count.map(whole)).sum()
    }
}

/// Extrapolates a count to the whole time. If there are more events than hardware counters, each
/// event is counted for only a part of the time.
fn whole(seen: CountAndTime) -> u64 {
    let (count, all, counted) = (seen.count, seen.time_enabled, seen.time_running);
    if counted == 0 || counted >= all {
        return count;
    }
    (u128::from(count) * u128::from(all) / u128::from(counted)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_counted_for_a_part_of_the_time_stands_for_all_of_it() {
        let seen = |count, time_enabled, time_running| CountAndTime {
            count,
            time_enabled,
            time_running,
        };
        assert_eq!(whole(seen(10, 1000, 250)), 40);
        assert_eq!(whole(seen(10, 1000, 1000)), 10);
        assert_eq!(whole(seen(0, 0, 0)), 0);
        assert_eq!(whole(seen(1 << 50, 1 << 40, 1 << 39)), 1 << 51);
    }
}
