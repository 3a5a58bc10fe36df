//! A disk's image, which a newer image may supersede. (`fathom_files::superseded` has the order of
//! steps.)

use super::Served;
use fathom_stack::MarkedImage;

impl Served {
    /// Returns the image to which the disk writes.
    pub fn marked(&self) -> MarkedImage {
        self.stack.marked.clone()
    }

    /// Returns the image as users name it; for a file, the absolute path.
    pub fn location(&self) -> String {
        let location = &self.options.disk.location;
        let path = location
            .path()
            .and_then(|path| std::path::absolute(path).ok());
        path.map_or_else(|| location.to_string(), |path| path.display().to_string())
    }

    /// Sets the reason why the disk's former image is not marked as superseded.
    pub fn set_unmarked(&mut self, problem: Option<String>) {
        self.unmarked = problem;
    }
}
