//! The marks of both images of a switch, until the switch is decided. (`fathom_files::superseded`
//! has the order of steps.)

use super::disk::Served;
use fathom_files::superseded::Superseded;
use fathom_stack::MarkedImage;
use std::path::PathBuf;

/// The old image is marked as superseded by the new one, which has no mark.
pub struct Marks<'a> {
    old: &'a MarkedImage,
    new: MarkedImage,
    mark: Superseded,
    /// The mark that the new image had.
    before: Option<Superseded>,
    /// Why the old image could not be marked.
    problem: Option<String>,
}

impl Marks<'_> {
    /// Marks the old image, and removes the mark of the new image. `new`: the disk with the new
    /// image. `definition`: the file that is going to name the new image. An old image that cannot
    /// be marked does not prevent the switch. The error is for the user: both images have their
    /// former marks.
    pub fn set<'a>(
        old: &'a MarkedImage,
        new: &Served,
        definition: Option<PathBuf>,
    ) -> Result<Marks<'a>, String> {
        let (image, disk) = (new.location(), new.name().to_owned());
        let mark = Superseded::new(image, disk, definition);
        let problem = old.set_mark(&mark).err();
        let marks = Marks {
            old,
            before: new.marked().mark(),
            new: new.marked(),
            mark,
            problem,
        };
        if marks.before.is_some()
            && let Err(problem) = marks.new.clear_mark()
        {
            marks.take_back();
            return Err(problem);
        }
        Ok(marks)
    }

    /// Completes the marks, when the definition, if there is one, names the new image. Returns why
    /// the old image could not be marked.
    pub fn finish(mut self) -> Option<String> {
        if self.problem.is_none() && self.mark.definition.take().is_some() {
            self.problem = self.old.set_mark(&self.mark).err();
        }
        if let Some(problem) = &self.problem {
            tracing::warn!(
                "disk '{}': cannot mark the old image as superseded by {}: {problem}; make sure \
                 that no program writes to the old image",
                self.mark.disk,
                self.mark.image
            );
        }
        self.problem
    }

    /// Restores the former marks: the disk stays on its old image.
    pub fn take_back(self) {
        if let Some(before) = &self.before {
            tell(&self.new, self.new.set_mark(before));
        }
        tell(self.old, self.old.clear_mark());
    }
}

fn tell(image: &MarkedImage, done: Result<(), String>) {
    if let Err(problem) = done {
        tracing::error!("{}: {problem}", image.location());
    }
}
