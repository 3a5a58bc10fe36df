//! The points of a request's path, and the layers between them.

use serde::Serialize;

/// A point on a request's path, in the order in which a request passes them. Points that were not
/// seen are missing. The time on both sides of a missing point belongs to one layer (see
/// [`Layer::between`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Point {
    /// The benchmark calls read() or write().
    Call,
    /// The guest's block layer queues the bio.
    Bio,
    /// The guest's driver gets the request and puts it into the ring at once.
    Issue,
    /// The guest writes the doorbell.
    Kick,
    /// The vCPU exits from the guest.
    Exit,
    /// KVM signals the eventfd. The time is from the signal's own event if a probe on it was
    /// possible. Otherwise it is from the doorbell's event, which KVM emits just before the signal
    /// (kvm_mmio, kvm_pio) or just after it (kvm_fast_mmio).
    Signal,
    /// The server wakes up.
    Wake,
    /// The server takes the request from the ring.
    Pop,
    /// The server passes the request to its image, after its filters.
    Map,
    /// The server passes the I/O to the kernel, or to the connection to another host.
    Device,
    /// The remote host's server receives the request.
    RemoteWake,
    /// The remote server takes the request on.
    RemotePop,
    /// The remote server passes the request to its image, after its filters.
    RemoteMap,
    /// The remote server passes the I/O to its kernel.
    RemoteDevice,
    /// The remote server gets the result.
    RemoteResult,
    /// The remote server passes the reply to its connection.
    RemoteSent,
    /// The host's block layer issues the request to the host's driver.
    HostIssue,
    /// The host's driver reports completion.
    HostComplete,
    /// The server gets the result.
    Result,
    /// The server puts the request into the used ring.
    Used,
    /// KVM sends the interrupt.
    Interrupt,
    /// The host's scheduler runs the sleeping vCPU's thread again.
    Woken,
    /// The vCPU enters the guest again; only for a vCPU that was outside the guest.
    Entry,
    /// The guest's interrupt handler runs.
    Handler,
    /// The guest's block layer completes the request.
    Complete,
    /// read() or write() returns.
    Return,
}

/// A layer that takes time. Each ns between a request's call and its return is in exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layer {
    /// Call to Issue: system call, file system, block layer of the guest.
    GuestSubmit,
    /// Issue to Kick, or to Pop if the server polls: waiting in the ring for the batch's kick.
    GuestBatch,
    /// Kick to Exit.
    KickExit,
    /// Exit to Signal: KVM decodes the doorbell.
    KickKvm,
    /// Signal to Wake.
    ServerWake,
    /// Kick to Wake, where KVM was not watched between them.
    KickPath,
    /// Wake to Pop: waiting for earlier requests of the batch.
    ServerPop,
    /// Pop to Map: filters.
    ServerQueue,
    /// Map to Device: image metadata.
    ServerMap,
    /// Device to RemoteWake: from this server to the remote one.
    NetworkOut,
    /// RemoteWake to RemotePop: waiting for earlier requests.
    RemotePop,
    /// RemotePop to RemoteMap: the remote server's filters.
    RemoteQueue,
    /// RemoteMap to RemoteDevice: image metadata of the remote server.
    RemoteMap,
    /// RemoteDevice to RemoteResult.
    RemoteDevice,
    /// RemoteResult to RemoteSent.
    RemoteAnswer,
    /// RemoteSent to Result: from the remote server back to this one.
    NetworkBack,
    /// Signal to HostIssue, where the server has no stamps of its own: QEMU, and the host's block
    /// layer above the driver.
    ServerIn,
    /// Wake to Device, where the server has no stamps between them.
    ServerTake,
    /// Device to HostIssue: system call and block layer of the host.
    HostSubmit,
    /// HostIssue to HostComplete.
    HostDevice,
    /// HostComplete to Result.
    HostReap,
    /// Device to Result without a host request that was seen: page cache, memory.
    HostIo,
    /// HostComplete to Interrupt, where the server has no stamps of its own.
    ServerOut,
    /// Result to Interrupt, where the server has no stamps between them.
    ServerAnswer,
    /// Result to Used, including the batching of completions.
    ServerFinish,
    /// Used to Interrupt.
    ServerNotify,
    /// Interrupt to Entry: waking the vCPU.
    VcpuWake,
    /// Interrupt to Woken: the host's scheduler.
    VcpuSchedule,
    /// Woken to Entry: KVM.
    VcpuEnter,
    /// Entry to Handler. Interrupt to Handler if the vCPU was in the guest, or if its entries were
    /// not traced.
    InterruptEntry,
    /// Used to Handler, where KVM was not watched between them.
    InterruptPath,
    /// Kick to Handler, where nothing was watched between them: the device as the guest sees it.
    GuestDevice,
    /// Handler to Complete. Used to Complete if a handler that was already running took the
    /// request.
    GuestBottomHalf,
    /// Complete to Return.
    GuestReturn,
    /// Time between points that are too far apart to belong to one layer.
    Unattributed,
}

/// The groups of layers, as in the wiki.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// Guest's system call, file system, block layer and driver.
    Guest,
    /// Host/guest switching.
    Switching,
    /// Host/VMM switching.
    ServerSwitching,
    /// QEMU, or the disk's server.
    Server,
    /// The network between two hosts.
    Network,
    /// The server on the other host.
    RemoteServer,
    /// The remote server's storage.
    RemoteIo,
    /// Host's system call, block layer, device and page cache.
    HostIo,
    /// Everything outside the guest, where only the guest was watched.
    Device,
    /// Time that belongs to no single layer.
    Unattributed,
}

impl Point {
    /// All points, in the order of the path.
    pub const ALL: &'static [Point] = &[
        Point::Call,
        Point::Bio,
        Point::Issue,
        Point::Kick,
        Point::Exit,
        Point::Signal,
        Point::Wake,
        Point::Pop,
        Point::Map,
        Point::Device,
        Point::RemoteWake,
        Point::RemotePop,
        Point::RemoteMap,
        Point::RemoteDevice,
        Point::RemoteResult,
        Point::RemoteSent,
        Point::HostIssue,
        Point::HostComplete,
        Point::Result,
        Point::Used,
        Point::Interrupt,
        Point::Woken,
        Point::Entry,
        Point::Handler,
        Point::Complete,
        Point::Return,
    ];
}

impl Layer {
    /// All layers, in the order of a request's path.
    pub const ALL: &'static [Layer] = &[
        Layer::GuestSubmit,
        Layer::GuestBatch,
        Layer::KickExit,
        Layer::KickKvm,
        Layer::ServerWake,
        Layer::KickPath,
        Layer::ServerPop,
        Layer::ServerQueue,
        Layer::ServerMap,
        Layer::NetworkOut,
        Layer::RemotePop,
        Layer::RemoteQueue,
        Layer::RemoteMap,
        Layer::RemoteDevice,
        Layer::RemoteAnswer,
        Layer::NetworkBack,
        Layer::ServerIn,
        Layer::ServerTake,
        Layer::HostSubmit,
        Layer::HostDevice,
        Layer::HostReap,
        Layer::HostIo,
        Layer::ServerOut,
        Layer::ServerAnswer,
        Layer::ServerFinish,
        Layer::ServerNotify,
        Layer::VcpuWake,
        Layer::VcpuSchedule,
        Layer::VcpuEnter,
        Layer::InterruptEntry,
        Layer::InterruptPath,
        Layer::GuestDevice,
        Layer::GuestBottomHalf,
        Layer::GuestReturn,
        Layer::Unattributed,
    ];

    /// Returns the first and last point of the layer; None for [`Layer::Unattributed`].
    pub fn span(self) -> Option<(Point, Point)> {
        Some(match self {
            Layer::GuestSubmit => (Point::Call, Point::Issue),
            Layer::GuestBatch => (Point::Issue, Point::Kick),
            Layer::KickExit => (Point::Kick, Point::Exit),
            Layer::KickKvm => (Point::Exit, Point::Signal),
            Layer::ServerWake => (Point::Signal, Point::Wake),
            Layer::KickPath => (Point::Kick, Point::Wake),
            Layer::ServerPop => (Point::Wake, Point::Pop),
            Layer::ServerQueue => (Point::Pop, Point::Map),
            Layer::ServerMap => (Point::Map, Point::Device),
            Layer::NetworkOut => (Point::Device, Point::RemoteWake),
            Layer::RemotePop => (Point::RemoteWake, Point::RemotePop),
            Layer::RemoteQueue => (Point::RemotePop, Point::RemoteMap),
            Layer::RemoteMap => (Point::RemoteMap, Point::RemoteDevice),
            Layer::RemoteDevice => (Point::RemoteDevice, Point::RemoteResult),
            Layer::RemoteAnswer => (Point::RemoteResult, Point::RemoteSent),
            Layer::NetworkBack => (Point::RemoteSent, Point::Result),
            Layer::ServerIn => (Point::Signal, Point::HostIssue),
            Layer::ServerTake => (Point::Wake, Point::Device),
            Layer::HostSubmit => (Point::Device, Point::HostIssue),
            Layer::HostDevice => (Point::HostIssue, Point::HostComplete),
            Layer::HostReap => (Point::HostComplete, Point::Result),
            Layer::HostIo => (Point::Device, Point::Result),
            Layer::ServerOut => (Point::HostComplete, Point::Interrupt),
            Layer::ServerAnswer => (Point::Result, Point::Interrupt),
            Layer::ServerFinish => (Point::Result, Point::Used),
            Layer::ServerNotify => (Point::Used, Point::Interrupt),
            Layer::VcpuWake => (Point::Interrupt, Point::Entry),
            Layer::VcpuSchedule => (Point::Interrupt, Point::Woken),
            Layer::VcpuEnter => (Point::Woken, Point::Entry),
            Layer::InterruptEntry => (Point::Interrupt, Point::Handler),
            Layer::InterruptPath => (Point::Used, Point::Handler),
            Layer::GuestDevice => (Point::Kick, Point::Handler),
            Layer::GuestBottomHalf => (Point::Handler, Point::Complete),
            Layer::GuestReturn => (Point::Complete, Point::Return),
            Layer::Unattributed => return None,
        })
    }

    /// Returns the layer of the time between two points, if no point between them was seen. The
    /// result is the narrowest layer whose [`span`](Self::span) contains both, else
    /// [`Layer::Unattributed`]. The join knows two more cases, which do not follow from the points
    /// alone. Issue to Pop of a polled request is [`Layer::GuestBatch`]. Used to Complete of a
    /// request that a running handler took is [`Layer::GuestBottomHalf`].
    pub fn between(from: Point, to: Point) -> Layer {
        let width = |&layer: &Layer| layer.span().map_or(u8::MAX, |(a, b)| b as u8 - a as u8);
        let holds = |layer: &Layer| layer.span().is_some_and(|(a, b)| a <= from && to <= b);
        let all = Layer::ALL.iter().copied();
        all.filter(holds)
            .min_by_key(width)
            .unwrap_or(Layer::Unattributed)
    }

    /// Returns whether the layer stands for several layers that could not be separated, because the
    /// points within it were not watched or not seen.
    pub fn is_gap(self) -> bool {
        matches!(
            self,
            Layer::KickPath
                | Layer::ServerIn
                | Layer::ServerTake
                | Layer::ServerOut
                | Layer::ServerAnswer
                | Layer::InterruptPath
                | Layer::GuestDevice
                | Layer::Unattributed
        )
    }

    /// Returns the layer's name in tables; a layer that is a gap in its run is not said to be more
    /// than what was seen.
    pub fn name(self, is_gap: bool) -> &'static str {
        match (self, is_gap) {
            (Layer::HostIo, true) => "host: I/O",
            _ => self.describe().0,
        }
    }

    /// Returns the layer's name in tables, and its group.
    pub fn describe(self) -> (&'static str, Group) {
        match self {
            Layer::GuestSubmit => ("guest: call to driver", Group::Guest),
            Layer::GuestBatch => ("guest: in the ring before the kick", Group::Guest),
            Layer::KickExit => ("kick: vCPU leaves the guest", Group::Switching),
            Layer::KickKvm => ("kick: KVM to eventfd", Group::Switching),
            Layer::ServerWake => ("kick: eventfd to server", Group::ServerSwitching),
            Layer::KickPath => ("kick: guest to server", Group::Switching),
            Layer::ServerPop => ("server: wake to taken", Group::Server),
            Layer::ServerQueue => ("server: filters", Group::Server),
            Layer::ServerMap => ("server: image metadata", Group::Server),
            Layer::NetworkOut => ("network: to the remote server", Group::Network),
            Layer::RemotePop => ("remote server: wake to taken", Group::RemoteServer),
            Layer::RemoteQueue => ("remote server: filters", Group::RemoteServer),
            Layer::RemoteMap => ("remote server: image metadata", Group::RemoteServer),
            Layer::RemoteDevice => ("remote server: its I/O", Group::RemoteIo),
            Layer::RemoteAnswer => ("remote server: finish", Group::RemoteServer),
            Layer::NetworkBack => ("network: back", Group::Network),
            Layer::ServerIn => ("server: eventfd to host's driver", Group::Server),
            Layer::ServerTake => ("server: wake to submit", Group::Server),
            Layer::HostSubmit => ("host: submit", Group::HostIo),
            Layer::HostDevice => ("host: device", Group::HostIo),
            Layer::HostReap => ("host: reap", Group::HostIo),
            Layer::HostIo => ("host: page cache, holes or zeroes", Group::HostIo),
            Layer::ServerOut => ("server: host's driver to interrupt", Group::Server),
            Layer::ServerAnswer => ("server: result to interrupt", Group::Server),
            Layer::ServerFinish => ("server: finish", Group::Server),
            Layer::ServerNotify => ("server: notify", Group::ServerSwitching),
            Layer::VcpuWake => ("interrupt: vCPU wakes", Group::Switching),
            Layer::VcpuSchedule => ("interrupt: host runs the vCPU", Group::Switching),
            Layer::VcpuEnter => ("interrupt: vCPU enters the guest", Group::Switching),
            Layer::InterruptEntry => ("interrupt: to the guest's handler", Group::Switching),
            Layer::InterruptPath => ("interrupt: server to guest", Group::Switching),
            Layer::GuestDevice => ("device, as the guest sees it", Group::Device),
            Layer::GuestBottomHalf => ("guest: handler to completion", Group::Guest),
            Layer::GuestReturn => ("guest: completion to return", Group::Guest),
            Layer::Unattributed => ("unattributed", Group::Unattributed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_layers_is_in_order_and_spans_what_it_says() {
        assert!(Layer::ALL.is_sorted());
        assert_eq!(Layer::ALL.len(), Layer::Unattributed as usize + 1);
        assert!(Point::ALL.is_sorted());
        assert_eq!(Point::ALL.len(), Point::Return as usize + 1);
        for &layer in Layer::ALL {
            if let Some((from, to)) = layer.span() {
                assert!(from < to, "{layer:?}");
                assert_eq!(Layer::between(from, to), layer);
            }
        }
    }

    #[test]
    fn a_gap_goes_to_the_narrowest_layer_that_holds_it() {
        use Point::*;
        let cases = [
            (Call, Bio, Layer::GuestSubmit),
            (Kick, Signal, Layer::KickPath),
            (Entry, Handler, Layer::InterruptEntry),
            (Wake, Map, Layer::ServerTake),
            (Signal, Device, Layer::ServerIn),
            (Wake, HostIssue, Layer::ServerIn),
            (Used, Handler, Layer::InterruptPath),
            (Result, Handler, Layer::GuestDevice),
            (Signal, Interrupt, Layer::GuestDevice),
            (Issue, Exit, Layer::Unattributed),
            (Issue, Pop, Layer::Unattributed),
            (Used, Complete, Layer::Unattributed),
        ];
        for (from, to, layer) in cases {
            assert_eq!(Layer::between(from, to), layer, "{from:?} to {to:?}");
        }
    }
}
