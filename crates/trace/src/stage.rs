//! Operations and stages of requests, and a request's time stamps.

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Op {
    /// Reads data.
    Read,
    /// Writes data.
    Write,
    /// Makes completed writes durable.
    Flush,
    /// Discards the data of a range.
    Discard,
    /// Writes zeroes to a range, without data.
    WriteZeroes,
    /// Returns which parts hold data (NBD's base:allocation).
    BlockStatus,
}

impl Op {
    /// Number of operations.
    pub const COUNT: usize = 6;
    /// All operations, in the order of their numbers.
    pub const ALL: [Op; Op::COUNT] = [
        Op::Read,
        Op::Write,
        Op::Flush,
        Op::Discard,
        Op::WriteZeroes,
        Op::BlockStatus,
    ];

    /// Returns the name that every table, file and protocol uses.
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

    /// Converts `op as u8` back to the operation.
    pub fn from_u8(value: u8) -> Option<Op> {
        Op::ALL.get(usize::from(value)).copied()
    }
}

/// Stage of a request inside Fathom. A request is in exactly one stage at any
/// instant, so the times of its stages add up to its total time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Stage {
    /// From the detection of work in the queue (by kick or poll) until the request is popped.
    Wake,
    /// From popping the request until the filters have admitted it.
    Queue,
    /// Lookup of the request's data in the image.
    Map,
    /// From submission to the storage until completion.
    Device,
    /// From completion until the reply is in the used ring.
    Finish,
    /// From publishing the reply until the interrupt is sent, or known to be unnecessary.
    Notify,
}

impl Stage {
    /// Number of stages.
    pub const COUNT: usize = 6;
    /// All stages, in the order in which a request passes them.
    pub const ALL: [Stage; Stage::COUNT] = [
        Stage::Wake,
        Stage::Queue,
        Stage::Map,
        Stage::Device,
        Stage::Finish,
        Stage::Notify,
    ];

    /// Returns the name that every table, file and protocol uses.
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

    /// Returns the beginning and the end of the stage, for the reader of a table.
    pub fn meaning(self) -> &'static str {
        match self {
            Stage::Wake => "from a kick or a poll that finds work until a worker takes the request",
            Stage::Queue => "until the filters pass the request on",
            Stage::Map => "lookup of the request's data in the image",
            Stage::Device => "from submission to the storage until completion",
            Stage::Finish => "from completion until the reply is ready for the guest or client",
            Stage::Notify => "until the interrupt or the reply is sent, or found unnecessary",
        }
    }
}

/// Times of a request in each stage, in clock ticks. A stage may be entered more than once; its
/// times add up.
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
    /// Returns the stamps of a request that was detected at `now`, in [`Stage::Wake`].
    #[inline]
    pub fn start(now: u64) -> Stamps {
        Stamps {
            spent: [0; Stage::COUNT],
            last: now,
            stage: Stage::Wake,
        }
    }

    /// Leaves the current stage and enters `stage` at `now`.
    ///
    /// If the clock has stepped back, for example between two CPU sockets, no time is counted.
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

    /// Returns the current stage.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Leaves the last stage at `now`.
    #[inline]
    pub fn end(&mut self, now: u64) {
        self.enter(self.stage, now);
    }

    /// Returns the ticks spent in each stage, in the order of [`Stage::ALL`].
    #[inline]
    pub fn spent(&self) -> &[u64; Stage::COUNT] {
        &self.spent
    }

    /// Returns the ticks from the start to the last transition: the sum of all stages.
    #[inline]
    pub fn total(&self) -> u64 {
        self.spent.iter().sum()
    }

    /// Returns the clock at the last transition.
    #[inline]
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Returns the clock at the start and at the end of each stage, as if each stage had been
    /// entered once and in order.
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
