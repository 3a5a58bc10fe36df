//! Links each kick to its doorbell.

use std::collections::VecDeque;

use super::Joiner;
use super::requests::compatible;

/// Kicks of a guest's CPU and doorbells of its vCPU, as (ID, time); both come in the same order,
/// one doorbell for each kick.
#[derive(Debug, Default)]
pub(super) struct Lane {
    vcpu: Option<u32>,
    pub(super) kicks: VecDeque<(u64, i64)>,
    pub(super) doorbells: VecDeque<(u64, i64)>,
}

impl Joiner<'_> {
    pub(super) fn lane(&mut self, vcpu: Option<u32>) -> &mut Lane {
        let vcpu = vcpu.filter(|_| self.kvm.by_vcpu);
        let known = self.lanes.iter().position(|lane| lane.vcpu == vcpu);
        let index = known.unwrap_or_else(|| {
            self.lanes.push(Lane {
                vcpu,
                ..Lane::default()
            });
            self.lanes.len() - 1
        });
        &mut self.lanes[index]
    }

    /// Links kicks to doorbells: a vCPU's first kick belongs to its first doorbell.
    pub(super) fn link(&mut self, due: i64) {
        let since = self.window_start();
        for lane in &mut self.lanes {
            while let (Some(&(kick, at)), Some(&(doorbell, rung))) =
                (lane.kicks.front(), lane.doorbells.front())
                && at.max(rung) <= due
            {
                if rung < at - self.error {
                    // No kick was seen for this doorbell.
                    lane.doorbells.pop_front();
                    let told = self.kvm.doorbells.get(doorbell);
                    let linked = told.is_none_or(|doorbell| doorbell.linked);
                    self.counts.inconsistent +=
                        u64::from(!linked && self.probes.kick && rung >= since);
                    continue;
                }
                lane.kicks.pop_front();
                let next = lane.kicks.front();
                if next.is_some_and(|&(_, next)| next < rung - self.error) {
                    // The vCPU cannot kick again before it has left the guest.
                    self.counts.inconsistent += u64::from(self.probes.doorbell);
                    continue;
                }
                lane.doorbells.pop_front();
                let Some(bell) = self.kvm.doorbells.get_mut(doorbell) else {
                    continue;
                };
                if let Some(kick) = self.guest.kicks.get_mut(kick)
                    && compatible(kick.queue, bell.queue)
                {
                    kick.doorbell = Some(doorbell);
                    bell.linked = true;
                } else {
                    self.counts.inconsistent += 1;
                }
            }
        }
    }

    /// Gives up kicks without a doorbell, and doorbells without a kick, from before `at`.
    pub(super) fn close_lanes(&mut self, at: i64) {
        let since = self.window_start();
        let (last, last_host) = (self.last, self.last_host);
        let (kvm, probes) = (&self.kvm, self.probes);
        let expected = |doorbell: u64, rung: i64| {
            let told = kvm.doorbells.get(doorbell);
            probes.kick
                && rung >= since
                && rung <= last
                && told.is_none_or(|doorbell| !doorbell.linked)
        };
        for lane in &mut self.lanes {
            while let Some(&(_, kick)) = lane.kicks.front()
                && kick < at
            {
                lane.kicks.pop_front();
                // The doorbell of a kick at the end may follow the host's last event.
                self.counts.inconsistent += u64::from(probes.doorbell && kick <= last_host);
            }
            while let Some(&(doorbell, rung)) = lane.doorbells.front()
                && rung < at
            {
                lane.doorbells.pop_front();
                self.counts.inconsistent += u64::from(expected(doorbell, rung));
            }
        }
    }
}
