//! Images in formats that Fathom writes: served with random requests and crashes, and changed
//! offline.

mod bitmap;
mod compressed;
mod compressed_writes;
mod corrupt;
mod crash;
mod edit;
mod ends;
mod hostile;
mod hostile_saved_state;
mod imago;
mod io_errors;
mod kill;
mod model;
mod power_cut;
mod qemu;
mod resize;
mod support;
