//! What is to be copied into an image below: what those above it have.

use fathom_core::Changes;
use fathom_formats::served::Mapper;
use fathom_units::cause;

/// So many bytes are looked up in tables at once.
const MAPPED: usize = 16 << 30;

/// It is looked whether to stop after so many extents.
const LOOK: usize = 1024;

/// Marks what the first `layers` images that `mapper` knows have; unless that is stopped. What they have stays. The error is
/// for the user.
pub(crate) fn mark(
    mapper: &mut Mapper,
    layers: usize,
    stops: &dyn Fn() -> bool,
    todo: &Changes,
) -> Result<(), String> {
    for from in (0..todo.size()).step_by(MAPPED) {
        let to = todo.size().min(from + MAPPED as u64);
        for (n, extent) in mapper.extents(from..to, layers).enumerate() {
            if n % LOOK == 0 && stops() {
                return Ok(());
            }
            let extent =
                extent.map_err(|error| format!("cannot read the disk: {}", cause(error)))?;
            // (Behind the end of a short image there are zeroes, whatever is below it.)
            if !extent.is_below() {
                todo.mark(extent.start, extent.len);
            }
        }
    }
    Ok(())
}
