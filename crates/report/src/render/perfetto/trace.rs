//! Perfetto's trace packets (protos/perfetto/trace/trace_packet.proto): tracks, slices, instants,
//! flows.

use std::collections::HashMap;

use super::proto::Message;

/// Field numbers, by message.
mod field {
    pub const TRACE_PACKET: u32 = 1;
    pub mod packet {
        pub const TIMESTAMP: u32 = 8;
        pub const TRUSTED_PACKET_SEQUENCE_ID: u32 = 10;
        pub const TRACK_EVENT: u32 = 11;
        pub const INTERNED_DATA: u32 = 12;
        pub const SEQUENCE_FLAGS: u32 = 13;
        pub const TRACK_DESCRIPTOR: u32 = 60;
    }
    pub mod event {
        pub const DEBUG_ANNOTATIONS: u32 = 4;
        pub const TYPE: u32 = 9;
        pub const NAME_IID: u32 = 10;
        pub const TRACK_UUID: u32 = 11;
        pub const NAME: u32 = 23;
        pub const FLOW_IDS: u32 = 47;
        pub const TERMINATING_FLOW_IDS: u32 = 48;
    }
    pub mod annotation {
        pub const UINT: u32 = 3;
        pub const INT: u32 = 4;
        pub const STRING: u32 = 6;
        pub const NAME: u32 = 10;
    }
    pub mod descriptor {
        pub const UUID: u32 = 1;
        pub const NAME: u32 = 2;
        pub const PROCESS: u32 = 3;
        pub const THREAD: u32 = 4;
        pub const PARENT_UUID: u32 = 5;
        pub const CHILD_ORDERING: u32 = 11;
        pub const SIBLING_ORDER_RANK: u32 = 12;
    }
    pub const EVENT_NAMES: u32 = 2;
    pub const INTERNED_IID: u32 = 1;
    pub const INTERNED_NAME: u32 = 2;
}

const SLICE_BEGIN: u64 = 1;
const SLICE_END: u64 = 2;
const INSTANT: u64 = 3;
const STATE_CLEARED: u64 = 1;
const NEEDS_STATE: u64 = 2;
const ORDERED_BY_RANK: u64 = 3;
const SEQUENCE: u64 = 1;

/// A track, by its contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Track<'a> {
    /// A top-level track.
    Top(&'a str),
    /// The parent of the lanes of one side.
    Side(&'static str, u32),
    /// A lane of the side with this uuid; the last field is the lane's number.
    Lane(u64, &'static str, u32),
    Process(u32, &'a str),
    /// (pid, tid, name)
    Thread(u32, u32, &'a str),
}

/// How a slice continues an arrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    None,
    /// The arrow passes through this slice.
    Through(u64),
    /// The arrow ends at this slice.
    End(u64),
}

/// The value of an annotation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'a> {
    Uint(u64),
    Int(i64),
    Text(&'a str),
}

/// A trace that is being built.
pub(super) struct Trace {
    tracks: Vec<Message>,
    /// (time, event); sorted by time at the end, in the order of their arrival if times are equal.
    events: Vec<(u64, Message)>,
    names: HashMap<String, u64>,
    interned: Message,
    last_uuid: u64,
}

impl Trace {
    pub(super) fn new() -> Trace {
        Trace {
            tracks: Vec::new(),
            events: Vec::new(),
            names: HashMap::new(),
            interned: Message::new(),
            last_uuid: 0,
        }
    }

    /// Adds a track and returns its uuid. Sides and lanes are ordered by rank.
    pub(super) fn track(&mut self, track: Track) -> u64 {
        use field::descriptor::*;
        self.last_uuid += 1;
        let uuid = self.last_uuid;
        let mut descriptor = Message::new();
        descriptor.uint(UUID, uuid);
        match track {
            Track::Top(name) => {
                descriptor.text(NAME, name);
            }
            Track::Side(name, rank) => {
                descriptor
                    .text(NAME, name)
                    .uint(CHILD_ORDERING, ORDERED_BY_RANK)
                    .uint(SIBLING_ORDER_RANK, u64::from(rank));
            }
            Track::Lane(side, name, lane) => {
                descriptor
                    .text(NAME, &format!("{name} {lane}"))
                    .uint(PARENT_UUID, side)
                    .uint(SIBLING_ORDER_RANK, u64::from(lane));
            }
            Track::Process(pid, name) => {
                let mut process = Message::new();
                process.uint(1, u64::from(pid)).text(6, name);
                descriptor.message(PROCESS, &process);
            }
            Track::Thread(pid, tid, name) => {
                let mut thread = Message::new();
                let ids = thread.uint(1, u64::from(pid)).uint(2, u64::from(tid));
                ids.text(5, name);
                descriptor.message(THREAD, &thread);
            }
        }
        self.tracks.push(descriptor);
        uuid
    }

    /// Begins a slice. On one track, times must not decrease, and slices must nest.
    pub(super) fn slice(
        &mut self,
        track: u64,
        at: i64,
        name: &str,
        flow: Flow,
        said: &[(&str, Value)],
    ) {
        let mut event = self.event(SLICE_BEGIN, track);
        event.uint(field::event::NAME_IID, self.iid(name));
        match flow {
            Flow::None => {}
            Flow::Through(id) => {
                event.fixed(field::event::FLOW_IDS, id);
            }
            Flow::End(id) => {
                event.fixed(field::event::TERMINATING_FLOW_IDS, id);
            }
        }
        annotate(&mut event, said);
        self.push(at, event);
    }

    /// Ends the slice of the track that began last.
    pub(super) fn end(&mut self, track: u64, at: i64) {
        let event = self.event(SLICE_END, track);
        self.push(at, event);
    }

    /// Adds an event without a duration.
    pub(super) fn instant(&mut self, track: u64, at: i64, name: &str, said: &[(&str, Value)]) {
        let mut event = self.event(INSTANT, track);
        event.uint(field::event::NAME_IID, self.iid(name));
        annotate(&mut event, said);
        self.push(at, event);
    }

    /// Adds an instant with lines of text; lines with the same name are numbered.
    pub(super) fn instant_about(
        &mut self,
        track: u64,
        at: i64,
        title: &str,
        lines: &[(&'static str, &str)],
    ) {
        let mut event = self.event(INSTANT, track);
        event.text(field::event::NAME, title);
        for (i, (name, text)) in lines.iter().enumerate() {
            let same = lines.iter().filter(|(other, _)| other == name).count();
            let before = lines[..i].iter().filter(|(other, _)| other == name).count();
            if same > 1 {
                let name = format!("{name} {}", before + 1);
                annotate(&mut event, &[(name.as_str(), Value::Text(text))]);
            } else {
                annotate(&mut event, &[(name, Value::Text(text))]);
            }
        }
        self.push(at, event);
    }

    /// Returns the time of the earliest event.
    pub(super) fn begin(&self) -> i64 {
        let first = self.events.iter().map(|(at, _)| *at).min();
        first.and_then(|at| i64::try_from(at).ok()).unwrap_or(0)
    }

    /// Returns the bytes of the file.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.events.sort_by_key(|(at, _)| *at);
        let mut trace = Message::new();
        let mut first = packet(STATE_CLEARED | NEEDS_STATE);
        first.message(field::packet::INTERNED_DATA, &self.interned);
        trace.message(field::TRACE_PACKET, &first);
        for descriptor in &self.tracks {
            let mut packet = packet(NEEDS_STATE);
            packet.message(field::packet::TRACK_DESCRIPTOR, descriptor);
            trace.message(field::TRACE_PACKET, &packet);
        }
        for (at, event) in &self.events {
            let mut packet = packet(NEEDS_STATE);
            packet
                .uint(field::packet::TIMESTAMP, *at)
                .message(field::packet::TRACK_EVENT, event);
            trace.message(field::TRACE_PACKET, &packet);
        }
        trace.into_bytes()
    }

    fn event(&self, kind: u64, track: u64) -> Message {
        let mut event = Message::new();
        event
            .uint(field::event::TYPE, kind)
            .uint(field::event::TRACK_UUID, track);
        event
    }

    fn push(&mut self, at: i64, event: Message) {
        self.events.push((u64::try_from(at).unwrap_or(0), event));
    }

    /// Returns the interning ID of a name; names occur many times.
    fn iid(&mut self, name: &str) -> u64 {
        if let Some(&iid) = self.names.get(name) {
            return iid;
        }
        let iid = self.names.len() as u64 + 1;
        let mut entry = Message::new();
        entry
            .uint(field::INTERNED_IID, iid)
            .text(field::INTERNED_NAME, name);
        self.interned.message(field::EVENT_NAMES, &entry);
        self.names.insert(name.to_owned(), iid);
        iid
    }
}

fn packet(flags: u64) -> Message {
    let mut packet = Message::new();
    packet
        .uint(field::packet::TRUSTED_PACKET_SEQUENCE_ID, SEQUENCE)
        .uint(field::packet::SEQUENCE_FLAGS, flags);
    packet
}

fn annotate(event: &mut Message, said: &[(&str, Value)]) {
    use field::annotation::*;
    for (name, value) in said {
        let mut annotation = Message::new();
        annotation.text(NAME, name);
        match value {
            Value::Uint(value) => annotation.uint(UINT, *value),
            Value::Int(value) => annotation.int(INT, *value),
            Value::Text(value) => annotation.text(STRING, value),
        };
        event.message(field::event::DEBUG_ANNOTATIONS, &annotation);
    }
}
