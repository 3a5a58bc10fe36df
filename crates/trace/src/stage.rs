//! The operations and stages that Fathom tells apart, and a request's stamps.

/// What a request asks of its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    /// Which parts hold data (NBD's base:allocation).
    BlockStatus,
}

impl Op {
    pub const COUNT: usize = 6;
    pub const ALL: [Op; Op::COUNT] = [
        Op::Read,
        Op::Write,
        Op::Flush,
        Op::Discard,
        Op::WriteZeroes,
        Op::BlockStatus,
    ];

    /// The name used in every table, file and protocol.
    pub fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
            Op::Flush => "flush",
            Op::Discard => "discard",
            Op::WriteZeroes => "write_zeroes",
            Op::BlockStatus => "block_status",
        }
    }

    /// The inverse of `op as u8`.
    pub fn from_u8(value: u8) -> Option<Op> {
        Op::ALL.get(usize::from(value)).copied()
    }
}

/// Where a request's time goes inside Fathom. A request is in exactly one
/// stage at any instant, so its stages add up to its total.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Stage {
    /// Work for the queue was noticed (by kick or by poll) -> popped.
    Wake,
    /// Popped -> admitted past the filters.
    Queue,
    /// The image looks up where the bytes live.
    Map,
    /// Handed to the storage -> completed.
    Device,
    /// Completed -> published in the used ring.
    Finish,
    /// Published -> interrupt sent, or known to be unwanted.
    Notify,
}

impl Stage {
    pub const COUNT: usize = 6;
    pub const ALL: [Stage; Stage::COUNT] = [
        Stage::Wake,
        Stage::Queue,
        Stage::Map,
        Stage::Device,
        Stage::Finish,
        Stage::Notify,
    ];

    /// The name used in every table, file and protocol.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Wake => "wake",
            Stage::Queue => "queue",
            Stage::Map => "map",
            Stage::Device => "device",
            Stage::Finish => "finish",
            Stage::Notify => "notify",
        }
    }

    /// From when to when, for who reads a table.
    pub fn meaning(self) -> &'static str {
        match self {
            Stage::Wake => {
                "from when work was noticed, by a kick or by looking, until it was taken"
            }
            Stage::Queue => "until the filters have let it pass",
            Stage::Map => "looking up where the image has the bytes",
            Stage::Device => "from when it was handed to the storage until that is done",
            Stage::Finish => "until the answer is where the guest or client finds it",
            Stage::Notify => "until the interrupt or the reply was sent, or known not to be wanted",
        }
    }
}

/// A request's way through the stages, in clock ticks. A stage may be
/// entered more than once; its times add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamps {
    spent: [u64; Stage::COUNT],
    last: u64,
    stage: Stage,
}

impl Default for Stamps {
    fn default() -> Stamps {
        Stamps::start(0)
    }
}

impl Stamps {
    /// A request whose work was noticed at `now`; it is in [`Stage::Wake`].
    #[inline]
    pub fn start(now: u64) -> Stamps {
        Stamps {
            spent: [0; Stage::COUNT],
            last: now,
            stage: Stage::Wake,
        }
    }

    /// Leave the current stage and enter `stage` at `now`. A clock that
    /// stepped back (between two sockets, say) counts as no time.
    #[inline]
    pub fn enter(&mut self, stage: Stage, now: u64) {
        if cfg!(fathom_unstamped) {
            return;
        }
        let now = now.max(self.last);
        self.spent[self.stage as usize] += now - self.last;
        self.last = now;
        self.stage = stage;
    }

    /// The stage that it is in.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Leave the last stage at `now`.
    #[inline]
    pub fn end(&mut self, now: u64) {
        self.enter(self.stage, now);
    }

    /// Ticks spent in each stage, in the order of [`Stage::ALL`].
    #[inline]
    pub fn spent(&self) -> &[u64; Stage::COUNT] {
        &self.spent
    }

    /// Ticks from the start to the last transition: the sum of all stages.
    #[inline]
    pub fn total(&self) -> u64 {
        self.spent.iter().sum()
    }

    /// The clock at the last transition.
    #[inline]
    pub fn last(&self) -> u64 {
        self.last
    }

    /// The clock at the start and at the end of each stage, as if each had
    /// been entered once and in order.
    #[inline]
    pub fn raw(&self) -> [u64; Stage::COUNT + 1] {
        let mut at = self.last - self.total();
        let mut raw = [at; Stage::COUNT + 1];
        for (out, spent) in raw[1..].iter_mut().zip(self.spent) {
            at += spent;
            *out = at;
        }
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_add_up_to_the_total_even_when_entered_twice() {
        let mut stamps = Stamps::start(100);
        stamps.enter(Stage::Queue, 110);
        stamps.enter(Stage::Map, 115);
        stamps.enter(Stage::Device, 120);
        stamps.enter(Stage::Map, 150);
        stamps.enter(Stage::Device, 151);
        stamps.enter(Stage::Finish, 200);
        stamps.enter(Stage::Notify, 203);
        stamps.end(210);
        assert_eq!(stamps.spent(), &[10, 5, 6, 79, 3, 7]);
        assert_eq!(stamps.total(), 110);
        assert_eq!(stamps.raw(), [100, 110, 115, 121, 200, 203, 210]);
    }

    #[test]
    fn a_clock_that_steps_back_costs_nothing() {
        let mut stamps = Stamps::start(100);
        stamps.enter(Stage::Queue, 90);
        stamps.end(105);
        assert_eq!(stamps.total(), 5);
    }

    #[test]
    fn operations_survive_their_encoding() {
        for op in Op::ALL {
            assert_eq!(Op::from_u8(op as u8), Some(op));
        }
        assert_eq!(Op::from_u8(Op::COUNT as u8), None);
    }
}
