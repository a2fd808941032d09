//! Opens a committed store: finds its volumes, and takes the newest whole manifest on any of them.
//!
//! The manifest names the store's volumes, and each volume has to be the one that is named. A volume that was
//! not given is found by the manifest of one that was. If that one lies elsewhere than its manifest says, or
//! a clone of the device is attached, it may be a copy, and the volumes found through it would be its
//! original's: that is refused unless all volumes are given.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memascend_nvme::{IoError, Volume, open_engine};

use crate::manifest::{Manifest, NotManifest, Written};
use crate::member::{Member, OpenEngine};
use crate::table::{Bytes, Generation, Table, Tagged};
use crate::{Result, Store, StoreError, StoreOptions};

/// A volume, and the manifest on it.
struct Candidate {
    path: PathBuf,
    member: Member,
    /// None if the volume has no note.
    manifest: Option<std::result::Result<Manifest, NotManifest>>,
    /// Fault of the last manifest, if `manifest` is the one before it.
    damaged: Option<String>,
}

impl Candidate {
    fn read(
        path: &Path,
        options: &StoreOptions,
        open: OpenEngine<'_>,
        notices: &mut Vec<String>,
    ) -> Result<Self> {
        let volume = Volume::attach(path, options.direct)?;
        let (member, notice) = Member::open(volume, open)?;
        // One notice is enough: a system that refuses io_uring refuses it for every volume.
        notices.extend(notice.filter(|notice| !notices.contains(notice)));
        let note = member.find_note()?;
        if note.damaged {
            notices.push(format!(
                "one of the two manifests on {} cannot be read: the last commit was cut short, or it was damaged since",
                path.display()
            ));
        }
        let manifest = note.note.map(|note| Manifest::parse(&note));
        let mut volume = Self { path: path.to_owned(), member, manifest, damaged: None };
        volume.fall_back();
        Ok(volume)
    }

    /// Takes the manifest before in the place of one that is damaged. A manifest that cannot be
    /// read, or of another version, is not replaced by an older one.
    fn fall_back(&mut self) {
        let Some(Err(NotManifest::Damaged(reason))) = &self.manifest else { return };
        let Some(Ok(before)) = self.member.find_note_before().map(|note| Manifest::parse(&note)) else {
            return;
        };
        if before.is_checked() {
            self.damaged = Some(reason.clone());
            self.manifest = Some(Ok(before));
            self.member.take_note_before();
        } else {
            // Its bytes may have been written over since, and nothing would tell.
            let reason = format!(
                "{reason}; the one before it, in {}.new, is whole, but names bytes that were written without checksums",
                self.note_path().display()
            );
            self.manifest = Some(Err(NotManifest::Damaged(reason)));
        }
    }

    fn note_path(&self) -> PathBuf {
        self.path.join(Volume::NOTE_NAME)
    }

    fn whole(&self) -> Option<&Manifest> {
        self.manifest.as_ref()?.as_ref().ok()
    }
}

impl Store {
    /// Opens a committed store. `paths` names at least one of its volumes; the manifest names the
    /// others.
    pub fn open(paths: &[PathBuf], options: &StoreOptions) -> Result<Self> {
        Self::open_with(paths, options, &|file| open_engine(file, options.engine))
    }

    /// As [`Store::open`], with engines that the caller opens.
    pub fn open_with(paths: &[PathBuf], options: &StoreOptions, open: OpenEngine<'_>) -> Result<Self> {
        let mut notices = Vec::new();
        let mut candidates: Vec<Candidate> = Vec::new();
        for path in paths {
            let volume = Candidate::read(path, options, open, &mut notices).map_err(|error| {
                let is_same = |candidate: &Candidate| {
                    path.canonicalize()
                        .is_ok_and(|path| candidate.path.canonicalize().is_ok_and(|other| other == path))
                };
                // This call holds its lock: report the duplicate path instead of a volume in use.
                if candidates.iter().any(is_same) {
                    StoreError::Duplicate { path: path.clone() }
                } else {
                    error
                }
            })?;
            candidates.push(volume);
        }
        // A volume that is not in `paths` may hold a newer manifest; but all manifests name the
        // same volumes.
        loop {
            let newest = newest(&candidates)?;
            let body = &newest.body;
            let present = |index: usize| candidates.iter().any(|volume| place(volume, newest) == Some(index));
            let missing = (0..body.volumes.len()).find(|index| !present(*index));
            if missing.is_some() || candidates.len() > paths.len() {
                candidates.iter().try_for_each(|volume| refuse_copy(volume, newest))?;
            }
            let Some(missing) = missing else { break };
            let path = memascend_nvme::path_of(&body.volumes[missing]);
            let volume =
                Candidate::read(&path, options, open, &mut notices).map_err(|error| match error {
                    StoreError::Volume(source) if source.is_absence() => StoreError::Missing {
                        path: path.clone(),
                        of: paths[0].clone(),
                        source: source.into(),
                    },
                    error => error,
                })?;
            let is_missing = |volume: &Candidate| place(volume, newest) == Some(missing);
            // A volume without a note is accepted where the manifest names it.
            if !is_missing(&volume) {
                let reason = match volume.whole() {
                    Some(other) if other.body.store == body.store => {
                        "it is another volume of the store than it was"
                    }
                    _ => "it belongs to another store than the volumes beside it",
                };
                return Err(StoreError::Manifest { path, reason: reason.into() });
            }
            candidates.push(volume);
        }
        Self::from_candidates(candidates, options, notices)
    }

    /// Puts the store together from all of its volumes.
    fn from_candidates(
        mut candidates: Vec<Candidate>,
        options: &StoreOptions,
        mut notices: Vec<String>,
    ) -> Result<Self> {
        let newest = newest(&candidates)?;
        let mut places = Vec::new();
        let (mut damaged, mut is_older) = (Vec::new(), false);
        for volume in &candidates {
            let path = volume.path.clone();
            match place(volume, newest) {
                None => {
                    let reason = "it does not belong to the store of the volumes beside it".into();
                    return Err(StoreError::Manifest { path, reason });
                }
                Some(index) if places.contains(&index) => return Err(StoreError::Duplicate { path }),
                Some(index) => places.push(index),
            }
            let reason = match &volume.manifest {
                Some(Err(reason)) => reason.to_string(),
                Some(Ok(_)) if volume.damaged.is_some() => volume.damaged.clone().expect("it was found"),
                _ => continue,
            };
            let went_back =
                volume.whole().is_some_and(|manifest| manifest.body.sequence == newest.body.sequence);
            let (is_from, which) = match &newest.body.current {
                _ if !went_back => ("of another volume", String::new()),
                Some(current) => ("before it", format!(", generation {}", current.number)),
                None => ("before it", ", which has checkpoints alone".into()),
            };
            notices.push(format!(
                "{}: {reason}; the one {is_from} was taken{which}, and the next commit writes it anew",
                path.display()
            ));
            is_older |= went_back;
            damaged.push(volume.note_path());
        }
        let best = candidates.iter().position(|volume| {
            std::ptr::eq(volume.whole().map_or(std::ptr::null(), |manifest| manifest), newest)
        });
        let best = best.expect("it is one of them");
        let (path, manifest) = (candidates[best].path.clone(), candidates[best].manifest.take());
        let Some(Ok(manifest)) = manifest else { unreachable!("it was whole") };
        let mut members: Vec<(usize, Member)> =
            places.into_iter().zip(candidates.into_iter().map(|volume| volume.member)).collect();
        members.sort_unstable_by_key(|(index, _)| *index);
        let mut members: Vec<Member> = members.into_iter().map(|(_, member)| member).collect();
        for (member, life) in members.iter_mut().zip(&manifest.body.life) {
            member.life_before = *life;
        }
        let mut store = Self::of(members, manifest.layout.clone(), manifest.id, options, notices)?;
        store.damaged_manifests = damaged;
        store.is_older = is_older;
        store.restore(manifest).ok_or_else(|| StoreError::Manifest {
            path,
            reason: "its manifest names bytes beyond the end of a volume: a file was truncated or replaced"
                .into(),
        })?;
        Ok(store)
    }

    /// Fills the table from a manifest, if the volumes are as long as the manifest says.
    fn restore(&self, manifest: Manifest) -> Option<()> {
        let end = manifest.end();
        for (index, member) in self.members.iter().enumerate() {
            let volume = &member.volume;
            let needed = self.map.layout.share_bytes(index, end);
            if member.engine.needs_room()
                && needed > volume.capacity().unwrap_or_else(|| volume.reserved_bytes())
            {
                return None;
            }
            if member.engine.needs_room() {
                // On a device this only counts how much of it the store uses.
                volume.reserve(needed).ok()?;
            }
        }
        self.sequence.store(manifest.body.sequence, Ordering::Relaxed);
        self.table().fill(manifest)
    }
}

impl Table {
    /// Fills an empty table from a manifest. None if the manifest contradicts itself.
    pub(crate) fn fill(&mut self, manifest: Manifest) -> Option<()> {
        let mut names: Vec<Option<Arc<str>>> = vec![None; manifest.sums.len()];
        let generations = || manifest.body.snapshots.iter().chain(&manifest.body.current);
        for (name, version) in generations().flat_map(|written| &written.tensors) {
            names[*version].get_or_insert_with(|| name.as_str().into());
        }
        let mut keys = Vec::new();
        let mut shared: Vec<Arc<str>> = Vec::new();
        for ((version, sums), name) in manifest.body.versions.iter().zip(manifest.sums).zip(names) {
            let name = name?;
            shared.push(Arc::clone(&name));
            keys.push(self.insert(Bytes::new(name, version.extents(), Some(sums)), false).offset);
        }
        let generation = |written: &Written| {
            let tensor = |(_, version): &(String, usize)| (Arc::clone(&shared[*version]), keys[*version]);
            let mut tensors: Vec<_> = written.tensors.iter().map(tensor).collect();
            tensors.sort_unstable();
            Generation {
                number: written.number,
                time: written.time,
                state: Arc::clone(&written.state),
                tensors: tensors.into(),
            }
        };
        self.last_number = generations().map(|written| written.number).max().unwrap_or(0);
        for written in &manifest.body.snapshots {
            self.add_snapshot(Tagged { tag: written.tag.as_str().into(), generation: generation(written) });
        }
        if let Some(current) = manifest.body.current.as_ref().map(generation) {
            for (name, key) in current.tensors.iter() {
                self.create_tensor(Arc::clone(name), *key);
            }
            let last = self.last_number;
            self.pin(&current);
            self.commit(Some(current), true);
            self.last_number = last;
        }
        Some(())
    }
}

/// The newest manifest that is whole.
fn newest(candidates: &[Candidate]) -> Result<&Manifest> {
    let whole = || candidates.iter().filter_map(|volume| Some((volume, volume.whole()?)));
    let Some((_, newest)) = whole().max_by_key(|(_, manifest)| manifest.body.sequence) else {
        // A damaged manifest explains more than a missing one.
        for Candidate { path, manifest, .. } in candidates {
            if let Some(Err(reason)) = manifest {
                return Err(StoreError::Manifest { path: path.clone(), reason: reason.to_string() });
            }
        }
        let path = candidates.first().ok_or(StoreError::NoVolume)?.path.clone();
        return Err(IoError::not_kept(&path).into());
    };
    for (volume, manifest) in whole() {
        if manifest.body.store != newest.body.store
            || manifest.body.volumes.len() != newest.body.volumes.len()
        {
            let reason = "it belongs to another store than the volumes beside it".into();
            return Err(StoreError::Manifest { path: volume.path.clone(), reason });
        }
    }
    Ok(newest)
}

/// Refuses a copy of one of the store's volumes: its manifest leads to the other volumes, which belong to the
/// original.
fn refuse_copy(volume: &Candidate, newest: &Manifest) -> Result<()> {
    let Some(index) = place(volume, newest) else { return Ok(()) };
    let volumes = &newest.body.volumes;
    if volumes[index] == volume.member.volume.identity() {
        // A clone of a device has its UUID.
        return Ok(volume.member.volume.refuse_clone()?);
    }
    let others = volumes.iter().enumerate().filter(|(other, _)| *other != index);
    let shown = |identity: &str| memascend_nvme::path_of(identity).display().to_string();
    let others: Vec<String> = others.map(|(_, identity)| shown(identity)).collect();
    Err(StoreError::Copied {
        path: volume.path.clone(),
        recorded: shown(&volumes[index]),
        others: others.join(" and "),
    })
}

/// The index of a volume in its store: from its own manifest, or from the newest one, which names
/// the volume.
fn place(volume: &Candidate, newest: &Manifest) -> Option<usize> {
    match volume.whole() {
        Some(manifest) => (manifest.body.store == newest.body.store).then_some(manifest.volume),
        None => {
            let identity = volume.member.volume.identity();
            newest.body.volumes.iter().position(|volume| *volume == identity)
        }
    }
}
