//! A model of the host of disks as the registry sees it, and of the disks' images.

use fathom_control::{
    Done, ErrorKind, HostRequest, RequestError, Slot, SwitchTo, unknown_disk, version_of,
};
use fathom_spec::DiskSpec;
use serde::Serialize;
use std::collections::BTreeMap;

/// An image file.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Image {
    /// Number of writes in the image, of all that were acknowledged to its disk's users.
    pub writes: u8,
    /// The mark of a superseded image.
    pub mark: Option<Mark>,
    /// Whether the image opens only with a key.
    pub has_key: bool,
}

/// The mark of a superseded image.
#[derive(Clone, Debug, Serialize)]
pub struct Mark {
    /// The disk that was switched to a newer image.
    pub disk: String,
    /// Whether a disk's file decides about the switch: the mark counts unless the file still
    /// names this image.
    pub is_undecided: bool,
}

/// A served disk.
#[derive(Clone, Debug, Serialize)]
pub struct Served {
    pub spec: DiskSpec,
    /// The other image, while users wait for a switch.
    pub switching: Option<DiskSpec>,
}

/// A request to the host without a reply.
#[derive(Clone, Debug, Serialize)]
pub struct Asked {
    pub disk: String,
    pub slot: Slot,
    pub request: HostRequest,
    /// Whether a client has named the image.
    pub is_explicit: bool,
}

/// Whether a request is carried out, and the reply.
pub type Lie = (bool, Result<Done, RequestError>);

#[derive(Clone, Debug, Default, Serialize)]
pub struct Host {
    pub disks: BTreeMap<String, Served>,
    pub images: BTreeMap<String, Image>,
    pub asked: Vec<Asked>,
    /// Number of writes that were acknowledged to each disk's users.
    pub acknowledged: BTreeMap<String, u8>,
    /// A tenant's disk, whose process is under the control of its guest.
    pub hostile: Option<String>,
    /// Old rule: superseded images get no mark.
    pub marks_nothing: bool,
    /// Old rule: users continue before the file of the disk is written.
    pub holds_nobody: bool,
}

impl Host {
    pub fn image_of(&self, disk: &str) -> Option<String> {
        Some(self.disks.get(disk)?.spec.image.to_string())
    }

    /// Returns possible replies of a hostile disk's process, each with and without carrying out the
    /// request.
    ///
    /// Replies of another type never reach the registry: the supervisor converts them to errors.
    pub fn lies(&self, asked: &Asked) -> Vec<Lie> {
        if self.hostile.as_ref() != Some(&asked.disk) {
            return Vec::new();
        }
        let claims: Vec<Result<Done, RequestError>> = match &asked.request {
            HostRequest::Put { .. } => [true, false]
                .map(|created| Ok(Done::Put { created }))
                .into(),
            HostRequest::Remove { .. } => vec![Ok(Done::Removed(Box::default()))],
            HostRequest::SetFilter { filter, options } => {
                vec![Ok(Done::FilterSet(fathom_stack::FilterInfo {
                    name: filter.clone(),
                    options: options.clone(),
                    held_ns: None,
                }))]
            }
            // The supervisor replies from its own records.
            HostRequest::ShowOptions => return Vec::new(),
            other => panic!("{other:?}"),
        };
        let errors = [ErrorKind::Unknown, ErrorKind::Conflict, ErrorKind::Late]
            .map(|kind| Err(kind.because("a lie")));
        { claims.into_iter().chain(errors) }
            .flat_map(|reply| [(true, reply.clone()), (false, reply)])
            .collect()
    }

    /// Carries out a request. `files` are the definitions of persistent disks.
    pub fn carry_out(
        &mut self,
        asked: &Asked,
        files: &BTreeMap<String, DiskSpec>,
    ) -> Result<Done, RequestError> {
        let name = &asked.disk;
        if let HostRequest::Put {
            spec,
            named,
            only_if,
        } = &asked.request
        {
            let present = self.disks.get(name);
            let version = present.map(|disk| version_of(&disk.spec).unwrap());
            only_if.check(name, version.as_deref())?;
            let spec = spec.clone().without_defaults();
            return match present {
                None => self.open(asked, spec, files),
                Some(disk) => {
                    let wanted = match named {
                        Some(named) => spec.over(named, &disk.spec).unwrap(),
                        None => spec,
                    };
                    self.change(name, wanted)
                }
            };
        }
        let Some(disk) = self.disks.get(name) else {
            return Err(unknown_disk(name, &[]));
        };
        let is_busy = disk.switching.is_some();
        match &asked.request {
            HostRequest::EndSwitch { go } => self.end_switch(name, *go),
            HostRequest::ShowOptions => Ok(Done::Options(Box::new(disk.spec.clone()))),
            _ if is_busy => Err(ErrorKind::Conflict.because("busy")),
            HostRequest::Remove { .. } => {
                self.disks.remove(name);
                Ok(Done::Removed(Box::default()))
            }
            HostRequest::SetFilter { filter, options } => {
                let mut spec = disk.spec.clone();
                spec.set_filter(0, options);
                self.disks.get_mut(name).unwrap().spec = spec;
                Ok(Done::FilterSet(fathom_stack::FilterInfo {
                    name: filter.clone(),
                    options: options.clone(),
                    held_ns: None,
                }))
            }
            HostRequest::BeginSwitch { to, .. } => self.begin_switch(name, to, files),
            other => panic!("{other:?}"),
        }
    }

    fn open(
        &mut self,
        asked: &Asked,
        spec: DiskSpec,
        files: &BTreeMap<String, DiskSpec>,
    ) -> Result<Done, RequestError> {
        let failed = |text: &str| Err(ErrorKind::Failed.because(text));
        let image = spec.image.to_string();
        if (self.disks.keys()).any(|other| self.image_of(other).as_ref() == Some(&image)) {
            return failed("in use by another disk");
        }
        let Some(state) = self.images.get_mut(&image) else {
            return failed("no such image");
        };
        if state.has_key && spec.keys.is_empty() {
            return failed("no key");
        }
        let names_it = files
            .get(&asked.disk)
            .is_some_and(|file| file.image == spec.image);
        state.mark.take_if(|mark| mark.is_undecided && names_it);
        if state.mark.is_some() && !self.marks_nothing {
            return failed("superseded");
        }
        if asked.is_explicit {
            let disk = asked.disk.clone();
            self.acknowledged.insert(disk, state.writes);
        }
        let served = Served {
            spec,
            switching: None,
        };
        self.disks.insert(asked.disk.clone(), served);
        Ok(Done::Put { created: true })
    }

    fn change(&mut self, name: &str, wanted: DiskSpec) -> Result<Done, RequestError> {
        let disk = self.disks.get_mut(name).unwrap();
        if disk.switching.is_some() {
            return Err(ErrorKind::Conflict.because("busy"));
        }
        if !disk.spec.other_data(&wanted).is_empty() {
            return Err(ErrorKind::Conflict.because("another image"));
        }
        disk.spec = wanted;
        Ok(Done::Put { created: false })
    }

    fn begin_switch(
        &mut self,
        name: &str,
        to: &SwitchTo,
        files: &BTreeMap<String, DiskSpec>,
    ) -> Result<Done, RequestError> {
        let disk = self.disks.get_mut(name).unwrap();
        let old = disk.spec.image.to_string();
        let (new, has_key) = match to {
            SwitchTo::Mirror => ("/mirror".to_owned(), true),
            SwitchTo::Layer(path) => (path.display().to_string(), false),
        };
        if old == new || (!has_key && self.images.contains_key(&new)) {
            return Err(ErrorKind::Failed.because("the image exists"));
        }
        let mut spec = disk.spec.clone().on(new.parse().unwrap(), disk.spec.format);
        if has_key {
            spec.keys = vec!["file:/key".parse().unwrap()];
        }
        disk.switching = Some(spec.clone());
        let mark = Mark {
            disk: name.to_owned(),
            is_undecided: files.contains_key(name),
        };
        let image = self.images.get_mut(&old).unwrap();
        image.mark = Some(mark);
        let writes = image.writes;
        let copy = Image {
            writes,
            mark: None,
            has_key,
        };
        self.images.insert(new, copy);
        Ok(Done::SwitchPrepared(Box::new(spec)))
    }

    fn end_switch(&mut self, name: &str, go: bool) -> Result<Done, RequestError> {
        let disk = self.disks.get_mut(name).unwrap();
        let Some(spec) = disk.switching.take() else {
            return Err(ErrorKind::Failed.because("no switch"));
        };
        let old = self.images.get_mut(&disk.spec.image.to_string()).unwrap();
        match go {
            true => {
                old.mark = Some(Mark {
                    disk: name.to_owned(),
                    is_undecided: false,
                });
                disk.spec = spec;
            }
            false => {
                old.mark = None;
                self.images.remove(&spec.image.to_string());
            }
        }
        Ok(Done::Switched)
    }

    /// Returns whether a guest can write. Users of a disk that is being switched wait.
    pub fn can_write(&self, disk: &str) -> bool {
        let served = self.disks.get(disk);
        served.is_some_and(|served| served.switching.is_none() || self.holds_nobody)
    }

    pub fn write(&mut self, disk: &str) {
        let image = self.image_of(disk).unwrap();
        let writes = self.acknowledged.entry(disk.to_owned()).or_default();
        *writes += 1;
        self.images.get_mut(&image).unwrap().writes = *writes;
    }
}
