//! Opens a store that was committed: looks at all of its volumes, and takes the newest manifest that any of them has.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use memascend_nvme::{IoError, Volume, open_engine};

use crate::manifest::{Manifest, NotManifest, Written};
use crate::member::{Member, OpenEngine};
use crate::table::{Bytes, Generation, Table, Tagged};
use crate::{Result, Store, StoreError, StoreOptions};

/// A volume that was found, and what is on it.
struct Found {
    path: PathBuf,
    member: Member,
    /// None where there is no note.
    manifest: Option<std::result::Result<Manifest, NotManifest>>,
}

impl Found {
    fn read(
        path: &Path,
        options: &StoreOptions,
        open: OpenEngine<'_>,
        notices: &mut Vec<String>,
    ) -> Result<Self> {
        let volume = Volume::attach(path, options.direct)?;
        let (member, notice) = Member::open(volume, open)?;
        // Once is enough: what refuses io_uring refuses it for every volume.
        notices.extend(notice.filter(|notice| !notices.contains(notice)));
        let found = member.find_note()?;
        if found.damaged {
            notices.push(format!(
                "one of the two manifests on {} cannot be read: the last commit was cut short, or it was damaged since",
                path.display()
            ));
        }
        let manifest = found.note.map(|note| Manifest::parse(&note));
        Ok(Self { path: path.to_owned(), member, manifest })
    }

    fn whole(&self) -> Option<&Manifest> {
        self.manifest.as_ref()?.as_ref().ok()
    }
}

impl Store {
    /// Opens a store to which something was committed: `paths` has one of its volumes at least, the others are found by what
    /// the manifest says of them.
    pub fn open(paths: &[PathBuf], options: &StoreOptions) -> Result<Self> {
        Self::open_with(paths, options, &|file| open_engine(file, options.engine))
    }

    /// As [`Store::open`], with engines of the caller's.
    pub fn open_with(paths: &[PathBuf], options: &StoreOptions, open: OpenEngine<'_>) -> Result<Self> {
        let mut notices = Vec::new();
        let mut found: Vec<Found> = Vec::new();
        for path in paths {
            let volume = Found::read(path, options, open, &mut notices).map_err(|error| {
                let twice = |found: &Found| {
                    path.canonicalize()
                        .is_ok_and(|path| found.path.canonicalize().is_ok_and(|found| found == path))
                };
                // Held by ourselves: say what is wrong rather than who is at fault.
                if found.iter().any(twice) { StoreError::Duplicate { path: path.clone() } } else { error }
            })?;
            found.push(volume);
        }
        // Volumes that nobody named may have a newer manifest than those that somebody did; but all name the same volumes.
        loop {
            let newest = newest(&found)?;
            let body = &newest.body;
            let present = |index: usize| found.iter().any(|found| place(found, newest) == Some(index));
            let Some(missing) = (0..body.volumes.len()).find(|index| !present(*index)) else { break };
            let path = PathBuf::from(&body.volumes[missing]);
            let volume = Found::read(&path, options, open, &mut notices)?;
            let right = |found: &Found| place(found, newest) == Some(missing);
            // It may have no note, if it is where the manifest says.
            if !right(&volume) {
                let reason = match volume.whole() {
                    Some(other) if other.body.store == body.store => {
                        "it is another volume of the store than it was"
                    }
                    _ => "it belongs to another store than the volumes beside it",
                };
                return Err(StoreError::Manifest { path, reason: reason.into() });
            }
            found.push(volume);
        }
        Self::from_found(found, options, notices)
    }

    fn from_found(mut found: Vec<Found>, options: &StoreOptions, mut notices: Vec<String>) -> Result<Self> {
        let newest = newest(&found)?;
        let mut places = Vec::new();
        for volume in &found {
            let path = volume.path.clone();
            match place(volume, newest) {
                None => {
                    let reason = "it does not belong to the store of the volumes beside it".into();
                    return Err(StoreError::Manifest { path, reason });
                }
                Some(index) if places.contains(&index) => return Err(StoreError::Duplicate { path }),
                Some(index) => places.push(index),
            }
            if let Some(Err(reason)) = &volume.manifest {
                notices.push(format!(
                    "{}: {reason}; the one of another volume was taken, and the next commit writes it anew",
                    path.display()
                ));
            }
        }
        let best = found
            .iter()
            .position(|found| std::ptr::eq(found.whole().map_or(std::ptr::null(), |m| m), newest));
        let best = best.expect("it is one of them");
        let (path, manifest) = (found[best].path.clone(), found[best].manifest.take());
        let Some(Ok(manifest)) = manifest else { unreachable!("it was whole") };
        let mut members: Vec<(usize, Member)> =
            places.into_iter().zip(found.into_iter().map(|found| found.member)).collect();
        members.sort_unstable_by_key(|(index, _)| *index);
        let mut members: Vec<Member> = members.into_iter().map(|(_, member)| member).collect();
        for (member, life) in members.iter_mut().zip(&manifest.body.life) {
            member.life_before = *life;
        }
        let store = Self::of(members, manifest.layout.clone(), manifest.id, options, notices)?;
        store.restore(manifest).ok_or_else(|| StoreError::Manifest {
            path,
            reason: "its manifest speaks of bytes that the volumes do not have: a file was made shorter, or is another".into(),
        })?;
        Ok(store)
    }

    /// Fills the table from a manifest, if the volumes hold what it says.
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
                // A device has it all; this says how much of it is the store's.
                volume.reserve(needed).ok()?;
            }
        }
        self.sequence.store(manifest.body.sequence, Ordering::Relaxed);
        self.table().fill(manifest)
    }
}

impl Table {
    /// Takes what a manifest says into an empty table.
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
                state: written.state.as_str().into(),
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
fn newest(found: &[Found]) -> Result<&Manifest> {
    let whole = || found.iter().filter_map(|found| Some((found, found.whole()?)));
    let Some((_, newest)) = whole().max_by_key(|(_, manifest)| manifest.body.sequence) else {
        // What is damaged says more than what is not there.
        for Found { path, manifest, .. } in found {
            if let Some(Err(reason)) = manifest {
                return Err(StoreError::Manifest { path: path.clone(), reason: reason.to_string() });
            }
        }
        let path = found.first().ok_or(StoreError::NoVolume)?.path.clone();
        return Err(IoError::NotKept { path }.into());
    };
    for (found, manifest) in whole() {
        if manifest.body.store != newest.body.store
            || manifest.body.volumes.len() != newest.body.volumes.len()
        {
            let reason = "it belongs to another store than the volumes beside it".into();
            return Err(StoreError::Manifest { path: found.path.clone(), reason });
        }
    }
    Ok(newest)
}

/// Which volume of a store one is: its own manifest says so, or that of another which names it.
fn place(found: &Found, newest: &Manifest) -> Option<usize> {
    match found.whole() {
        Some(manifest) => (manifest.body.store == newest.body.store).then_some(manifest.volume),
        None => {
            let identity = found.member.volume.identity();
            newest.body.volumes.iter().position(|volume| *volume == identity)
        }
    }
}
