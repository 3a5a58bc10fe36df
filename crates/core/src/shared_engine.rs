//! A single engine for all workers of a pool's thread. Each worker has a [`Share`], which looks
//! like an engine of its own.
//!
//! Operations pushed through a share carry the number of its member ([`Token::of`]), so that their
//! completions find the member. A share records what it has registered with the engine and removes
//! it when dropped. A share is dropped only when nothing of it is in flight.

use crate::engine::{Buffer, Completion, Engine, FileId, Io, SocketIo, Wait};
use crate::request::RequestId;
use crate::token::{Target, Token};
use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::rc::Rc;

/// State common to all shares.
pub(crate) struct SharedEngine {
    engine: RefCell<Box<dyn Engine>>,
    /// Completions that are not distributed yet.
    completions: RefCell<Vec<Completion>>,
    /// Number of operations for which the engine has room, the sum over all shares.
    reserved: Cell<usize>,
    /// Number of operations pushed since the kernel was last entered.
    pushed: Cell<usize>,
    /// The thread enters the kernel for several members together; members do not.
    pub(crate) is_crowded: Cell<bool>,
}

impl SharedEngine {
    pub(crate) fn new(engine: Box<dyn Engine>) -> Rc<SharedEngine> {
        Rc::new(SharedEngine {
            engine: RefCell::new(engine),
            completions: RefCell::default(),
            reserved: Cell::new(0),
            pushed: Cell::new(0),
            is_crowded: Cell::new(false),
        })
    }

    pub(crate) fn watch(&self, fd: RawFd, token: Token) -> io::Result<()> {
        self.engine.borrow_mut().watch(fd, token)
    }

    /// Returns the number of operations not submitted to the kernel yet.
    #[inline]
    pub(crate) fn pushed(&self) -> usize {
        self.pushed.get()
    }

    #[inline]
    pub(crate) fn is_ready(&self) -> bool {
        !self.completions.borrow().is_empty() || self.engine.borrow_mut().ready()
    }

    /// Submits the operations of all members to the kernel and collects completions for
    /// `take_completions`. Does not wait if there are completions already.
    #[inline]
    pub(crate) fn enter(&self, wait: Wait) -> io::Result<()> {
        self.pushed.set(0);
        let completions = &mut *self.completions.borrow_mut();
        let wait = match completions.is_empty() {
            true => wait,
            false => Wait::No,
        };
        self.engine.borrow_mut().submit(wait, completions)
    }

    /// Takes the completions. The caller gives the emptied buffer back before the kernel is entered
    /// again.
    #[inline]
    pub(crate) fn take_completions(&self) -> Vec<Completion> {
        self.completions.take()
    }

    #[inline]
    pub(crate) fn give_back(&self, completions: Vec<Completion>) {
        self.completions.replace(completions);
    }

    /// Changes the number of operations reserved for a member from `before` to `n`.
    fn reserve(&self, before: usize, n: usize) -> io::Result<()> {
        let all = self.reserved.get() - before + n;
        self.reserved.set(all);
        let mut completions = self.completions.borrow_mut();
        let more = (2 * all).saturating_sub(completions.len());
        completions.reserve(more);
        self.engine.borrow_mut().reserve(all)
    }
}

/// A member's operations in flight.
#[derive(Default)]
pub(crate) struct InFlight {
    /// Number of operations on files.
    operations: Cell<usize>,
    /// Tokens of the operations on sockets.
    on_sockets: RefCell<Vec<Token>>,
}

impl InFlight {
    pub(crate) fn is_nothing(&self) -> bool {
        self.operations.get() == 0 && self.on_sockets.borrow().is_empty()
    }

    /// Records a completion. Completions of watched eventfds have no pushed operation.
    #[inline]
    pub(crate) fn completed(&self, token: Token) {
        match token.target() {
            Target::Request { id, .. } if id != RequestId::NOBODY => {
                self.operations.set(self.operations.get() - 1);
            }
            Target::Request { .. } | Target::Source { .. } => {
                let mut on_sockets = self.on_sockets.borrow_mut();
                if let Some(known) = on_sockets.iter().position(|known| *known == token) {
                    on_sockets.swap_remove(known);
                }
            }
            _ => {}
        }
    }
}

/// A member's share of the engine.
pub(crate) struct Share {
    shared: Rc<SharedEngine>,
    member: u16,
    in_flight: Rc<InFlight>,
    reserved: usize,
    /// The memory of this member's sources is registered.
    pins: bool,
    /// The memory that this member has registered.
    memory: Vec<Buffer>,
    files: Vec<FileId>,
    sockets: Vec<RawFd>,
    watched: Vec<(RawFd, Token)>,
}

impl Share {
    pub(crate) fn new(shared: &Rc<SharedEngine>, member: u16) -> Share {
        Share {
            shared: shared.clone(),
            member,
            in_flight: Rc::default(),
            reserved: 0,
            pins: false,
            memory: Vec::new(),
            files: Vec::new(),
            sockets: Vec::new(),
            watched: Vec::new(),
        }
    }

    pub(crate) fn in_flight(&self) -> &Rc<InFlight> {
        &self.in_flight
    }

    fn mine(&self, token: Token) -> Token {
        token.of(self.member)
    }
}

/// Cancels a member's operations on sockets, which its peers might never let complete.
pub(crate) fn cancel_all(shared: &SharedEngine, in_flight: &InFlight) {
    for token in &*in_flight.on_sockets.borrow() {
        shared.engine.borrow_mut().cancel_socket(*token);
    }
}

impl Engine for Share {
    fn name(&self) -> &'static str {
        self.shared.engine.borrow().name()
    }

    fn reserve(&mut self, n: usize) -> io::Result<()> {
        let n = n.max(self.reserved);
        let before = std::mem::replace(&mut self.reserved, n);
        self.shared.reserve(before, n)
    }

    fn add_file(&mut self, file: BorrowedFd<'_>) -> io::Result<FileId> {
        let id = self.shared.engine.borrow_mut().add_file(file)?;
        self.files.push(id);
        Ok(id)
    }

    fn remove_file(&mut self, file: FileId) {
        self.files.retain(|known| *known != file);
        self.shared.engine.borrow_mut().remove_file(file);
    }

    fn pin_memory(&mut self) -> bool {
        self.pins = self.shared.engine.borrow_mut().pin_memory();
        self.pins
    }

    unsafe fn add_memory(&mut self, memory: &[Buffer]) {
        if self.pins {
            // SAFETY: as required of the caller.
            unsafe { self.shared.engine.borrow_mut().add_memory(memory) };
            self.memory.extend_from_slice(memory);
        }
    }

    fn remove_memory(&mut self, memory: &[Buffer]) {
        if self.pins {
            self.shared.engine.borrow_mut().remove_memory(memory);
            for buffer in memory {
                if let Some(known) = self.memory.iter().position(|known| known == buffer) {
                    self.memory.swap_remove(known);
                }
            }
        }
    }

    #[inline]
    unsafe fn push(&mut self, io: Io, token: Token) {
        let token = self.mine(token);
        let Share {
            shared, in_flight, ..
        } = self;
        in_flight.operations.set(in_flight.operations.get() + 1);
        shared.pushed.set(shared.pushed.get() + 1);
        // SAFETY: as required of the caller.
        unsafe { shared.engine.borrow_mut().push(io, token) };
    }

    fn add_socket(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.shared.engine.borrow_mut().add_socket(socket)?;
        self.sockets.push(socket.as_raw_fd());
        Ok(())
    }

    fn remove_socket(&mut self, socket: BorrowedFd<'_>) {
        self.sockets.retain(|known| *known != socket.as_raw_fd());
        self.shared.engine.borrow_mut().remove_socket(socket);
    }

    unsafe fn push_socket(&mut self, io: SocketIo, token: Token) {
        let token = self.mine(token);
        self.in_flight.on_sockets.borrow_mut().push(token);
        self.shared.pushed.set(self.shared.pushed.get() + 1);
        // SAFETY: as required of the caller.
        unsafe { self.shared.engine.borrow_mut().push_socket(io, token) };
    }

    fn cancel_socket(&mut self, token: Token) {
        let token = self.mine(token);
        self.shared.engine.borrow_mut().cancel_socket(token);
    }

    fn watch(&mut self, fd: RawFd, token: Token) -> io::Result<()> {
        let token = self.mine(token);
        self.shared.watch(fd, token)?;
        self.watched.push((fd, token));
        Ok(())
    }

    fn unwatch(&mut self, fd: RawFd, token: Token) {
        let token = self.mine(token);
        self.watched.retain(|known| *known != (fd, token));
        self.shared.engine.borrow_mut().unwatch(fd, token);
    }

    /// Enters the kernel unless the thread does so for several members. Never waits and returns no
    /// completions: both are the thread's task.
    fn submit(&mut self, _wait: Wait, _out: &mut Vec<Completion>) -> io::Result<()> {
        match self.shared.is_crowded.get() {
            true => Ok(()),
            false => self.shared.enter(Wait::No),
        }
    }

    fn ready(&mut self) -> bool {
        self.shared.is_ready()
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut engine = self.shared.engine.borrow_mut();
        for (fd, token) in &self.watched {
            engine.unwatch(*fd, *token);
        }
        for socket in &self.sockets {
            // SAFETY: the member that added the socket keeps it open until it is removed.
            engine.remove_socket(unsafe { BorrowedFd::borrow_raw(*socket) });
        }
        for file in &self.files {
            engine.remove_file(*file);
        }
        // Memory of sources that were never detached. The engine would use the old pages for the
        // mapping that gets this address next.
        engine.remove_memory(&self.memory);
        let reserved = &self.shared.reserved;
        reserved.set(reserved.get() - self.reserved);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An engine that lists the memory it has.
    struct Listing(Rc<RefCell<Vec<Buffer>>>);

    impl Engine for Listing {
        fn name(&self) -> &'static str {
            "listing"
        }

        fn reserve(&mut self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn add_file(&mut self, _: BorrowedFd<'_>) -> io::Result<FileId> {
            Ok(FileId(0))
        }

        fn remove_file(&mut self, _: FileId) {}

        fn pin_memory(&mut self) -> bool {
            true
        }

        unsafe fn add_memory(&mut self, memory: &[Buffer]) {
            self.0.borrow_mut().extend_from_slice(memory);
        }

        fn remove_memory(&mut self, memory: &[Buffer]) {
            let mut listed = self.0.borrow_mut();
            for buffer in memory {
                let place = listed.iter().position(|known| known == buffer);
                listed.swap_remove(place.expect("memory that was added"));
            }
        }

        unsafe fn push(&mut self, _: Io, _: Token) {}

        fn watch(&mut self, _: RawFd, _: Token) -> io::Result<()> {
            Ok(())
        }

        fn unwatch(&mut self, _: RawFd, _: Token) {}

        fn submit(&mut self, _: Wait, _: &mut Vec<Completion>) -> io::Result<()> {
            Ok(())
        }

        fn ready(&mut self) -> bool {
            false
        }
    }

    #[test]
    fn dropped_share_removes_its_memory() {
        let listed = Rc::default();
        let shared = SharedEngine::new(Box::new(Listing(Rc::clone(&listed))));
        let memory = [1, 2, 1].map(|n| Buffer { addr: n, len: 1 });
        let mut shares = [0, 1].map(|member| Share::new(&shared, member));
        for share in &mut shares {
            assert!(share.pin_memory());
            // SAFETY: the engine does not use the memory.
            unsafe { share.add_memory(&memory) };
        }
        shares[0].remove_memory(&memory[..1]);
        assert_eq!(listed.borrow().len(), 5);
        let [first, second] = shares;
        drop(first);
        assert_eq!(*listed.borrow(), memory);
        drop(second);
        assert!(listed.borrow().is_empty());
    }
}
