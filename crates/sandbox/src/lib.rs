//! The sandbox: limits what a compromised thread can do.
//!
//! Guests, clients and images are not trusted, and the code that reads them may have bugs. An
//! attacker who takes over a thread finds that most system calls end the process, and that no
//! privilege can be gained. Most data-plane threads can access no path and no port.
//!
//! # The order
//!
//! Seccomp filters add up: a call is executed only if all filters of a thread allow it. A later
//! filter cannot allow what an earlier one forbids. A new thread inherits the filters of the thread
//! that started it. Filters are therefore installed from the widest to the narrowest:
//!
//! 1. **The process's filter** is installed by its main thread, for all threads at once:
//!    [`cage_server`] or [`Tenant::lock_up`]. This filter allows every call that any thread of the
//!    process may need, including those that start and sandbox other threads.
//! 2. **A thread's filter** is installed by the thread itself: [`enter`]. The thread first creates
//!    what its filter forbids to create later, for example a worker's io_uring instance. A thread
//!    that is started by a sandboxed thread has at least the same restrictions. A thread that needs
//!    more than its starter is therefore started by the control plane.
//!
//! A data-plane thread that opens nothing by name, such as a worker, drops its capabilities before
//! it installs its filter. The thread also restricts itself with Landlock, so that no path and no
//! port is accessible. Landlock also applies to io_uring requests, which no filter sees. Besides,
//! io_uring instances are restricted to the requests that the engine makes (`fathom-storage`), and
//! their kernel threads execute no others.
//!
//! # Strong and weak parts
//!
//! Threads share their memory. An attacker who can write to all of it controls every thread, and
//! can do everything that any thread may do. Therefore **the process's filter, user, paths and
//! network are the security boundary**, and a thread's own filter only delays an attacker.
//!
//! A server with the API in its process therefore has a weak boundary. The server's main thread may
//! open files and replace itself with another program, as an upgrade does. Only the main thread may
//! call execve(2). A tenant has a strong boundary.
//!
//! # Reaction to an attack
//!
//! A call that is not on the list ends the process with SIGSYS, which its supervisor sees in the
//! exit status. A few calls fail with an error instead:
//!
//! - clone3(2), whose flags no filter can see. glibc falls back to clone(2).
//! - io_uring_setup(2) of a worker.
//! - Opening a file by name, in a thread that opens nothing by name.
//! - Calls that are newer than the lists.

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
