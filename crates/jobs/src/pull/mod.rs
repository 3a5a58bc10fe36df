//! A disk that moves here: it is copied from the server that has it while its guest goes on there, what
//! changes meanwhile is copied again, and when the guest comes here the disk is taken over from that
//! server. Until all of it is here, the guest waits.
//!
//! - `terms` are what is asked for, and what is told of it;
//! - `record` is what is known of it after a restart;
//! - `source` is that server, and what it says of changes;
//! - `puller` is what the thread does, again and again if need be, and `post_copy` what it does where the
//!   guest does not wait; it is started and asked by way of `handle`, and `shared` is what both know.
//!
//! Nothing is lost whatever is interrupted. As long as the disk has not been taken over, the other server
//! has it, and a copy that ends early is begun again. From the moment at which it has been taken over, and
//! until `record` says so durably, nobody has changed the copy but the puller: then, too, it can be begun
//! again. Only then the guest goes on. (With post-copy it goes on before: see there.)

mod handle;
mod post_copy;
mod puller;
mod record;
mod shared;
mod source;
mod terms;

pub use handle::{Going, Gone, Prepared, Pull};
pub use puller::Target;
pub use record::is_unfinished;
pub use terms::{Phase, Status, Terms};
