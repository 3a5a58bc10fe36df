//! The cage: what a thread that is no longer ours can still do.
//!
//! Guests, clients and images are not trusted, and what reads them may have a mistake. Whoever takes
//! over a thread by it finds that most system calls end the process, that no path and no port is
//! within reach, and that there is nothing to become.
//!
//! # The order
//!
//! Filters of system calls add up: a call happens only if all of a thread's filters let it through,
//! and what one forbids no later one allows. A new thread begins with those of the thread that started it.
//! So they are put on from the widest to the narrowest:
//!
//! 1. **The process's own**, by its main thread, on all threads at once: [`cage_server`] or
//!    [`Tenant::lock_up`]. It lets through whatever any thread of the process may ever do, starting
//!    the others and caging them included.
//! 2. **A thread's**, by itself: [`enter`], as soon as it has what only a beginning thread makes (a
//!    worker: its ring). A thread that a caged one starts is caged at least likewise, so nobody
//!    starts a thread that needs more than itself: what does is started by the control plane.
//!
//! Before its filter a thread of the data plane gives up its capabilities, and lets Landlock take all
//! paths and ports out of its reach. That holds for requests to a ring, too, which no filter sees.
//! Rings are restricted besides, to the requests that the engine makes (`fathom-storage`), and their
//! threads make no others.
//!
//! # What holds, and what only hinders
//!
//! Threads share their memory. Who writes to all of it makes another thread do what that one may. So
//! **the process's filter, user, paths and network are the wall**, and a thread's own filter is
//! a hindrance on the way there. A server that has the API in its process therefore has a weak wall:
//! its main thread may open files and replace itself by another program (as an upgrade does:
//! execve(2) is the main thread's alone). A tenant has a strong one.
//!
//! # What happens to an attack
//!
//! A call that is not on the list ends the process by SIGSYS; who watches over it sees that in
//! its status. A few are refused instead: clone3(2), whose flags no filter sees (glibc goes on
//! with clone(2)), a worker's further rings, and calls that are newer than the lists.

mod calls;
mod kind;
mod mode;
mod paths;
mod privileges;
mod process;
mod program;
mod report;
mod thread;

pub use kind::Kind;
pub use mode::Mode;
pub use paths::{Allowed, PathAccess};
pub use privileges::may_change_users;
pub use process::{Tenant, cage_server, enter, report};
pub use report::{Part, Report};
