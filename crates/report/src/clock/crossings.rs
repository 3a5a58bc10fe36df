//! A round's requests that were sent to another host, as each host saw them, to relate the hosts'
//! clocks. No request reaches the other server before it is sent, and no reply arrives before the
//! other server sends it.

use std::collections::HashMap;
use std::path::Path;

use fathom_run::{Event, Kind, Round};

use super::TimeBase;
use super::trips::{GuestTrip, HostTrip};
use crate::join::merge::Side;
use crate::join::parts::{Cookie, Record, Records};
use crate::join::way::{Class, Key};

/// Maximum number of requests used, spread over the whole time; more do not reduce the error.
const MOST: usize = 200_000;

/// By cookie: the time during which a request was away, or was at the remote server.
type Trips = HashMap<u64, (i64, i64)>;

/// Returns the requests that both hosts saw, by the clocks of each, in order of their start.
pub(crate) fn of(dir: &Path, round: &Round, time: &TimeBase) -> (Vec<GuestTrip>, Vec<HostTrip>) {
    let (mut sent, mut served) = (Trips::new(), Trips::new());
    // Takes one request in `every`, a power of two, by a hash of the cookie.
    let mut every: u64 = 1;
    let is_taken = |cookie: u64, every: u64| {
        cookie.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & (every - 1) == 0
    };
    each(dir, round, Side::Host, time, |record| {
        if let Some(Cookie::Went(cookie)) = record.cookie
            && is_taken(cookie, every)
        {
            sent.insert(cookie, (record.device, record.result));
            if sent.len() >= MOST {
                every *= 2;
                sent.retain(|cookie, _| is_taken(*cookie, every));
            }
        }
    });
    each(dir, round, Side::Remote, time, |record| {
        if let Some(Cookie::Came(cookie)) = record.cookie
            && sent.contains_key(&cookie)
        {
            let now = (record.wake, record.end);
            let trip = served.entry(cookie).or_insert(now);
            // The remote server may have carried out the request in pieces.
            *trip = (trip.0.min(now.0), trip.1.max(now.1));
        }
    });
    sent.retain(|cookie, _| served.contains_key(cookie));
    let key = |cookie| Key {
        class: Class::Any,
        offset: cookie,
        length: 0,
    };
    let guest = |(cookie, (issue, complete))| GuestTrip {
        key: key(cookie),
        issue,
        complete,
        kick: None,
        handler: None,
    };
    let host = |(cookie, (from, to))| HostTrip {
        key: Some(key(cookie)),
        from,
        to,
        exit: None,
        back: None,
    };
    let mut sent: Vec<GuestTrip> = sent.into_iter().map(guest).collect();
    let mut served: Vec<HostTrip> = served.into_iter().map(host).collect();
    sent.sort_by_key(|trip| (trip.issue, trip.key.offset));
    served.sort_by_key(|trip| (trip.from, trip.key.map(|key| key.offset)));
    (sent, served)
}

/// Calls `f` with each record of a side, in times of the side's own clock.
fn each(dir: &Path, round: &Round, side: Side, time: &TimeBase, mut f: impl FnMut(Record)) {
    let mut records = Records::default();
    for info in &round.streams {
        let Some(stream) = (Side::of(info.clock) == side)
            .then(|| round.open(dir, info).ok())
            .flatten()
        else {
            continue;
        };
        let ns = |ticks| {
            time.ns(info.clock, ticks)
                .or(time.remote_ns(info.clock, ticks))
        };
        let requests = stream
            .flatten()
            .filter(|event: &Event| event.kind == Kind::FathomRequest);
        for event in requests {
            let record = ns(event.time).and_then(|at| records.parse(at, &event, ns));
            record.into_iter().for_each(&mut f);
        }
    }
}
