//! The code of a directory's note over a simulated directory that loses power: after every operation, with every
//! unsynced name and sector kept or lost. A note that was written is found, whole; one that was being written is
//! found whole or not at all.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::rc::Rc;

use super::{DirectoryNotes, NOTE_BYTES_MAX, SPARE_NAME};
use crate::volume::folder::{NamedFile, Names};

const SECTOR_BYTES: usize = 512;

/// A small generator of random numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % limit.max(1)
    }
}

#[derive(Clone, Default)]
struct Inode {
    now: Vec<u8>,
    /// Content at the last flush.
    durable: Vec<u8>,
}

#[derive(Clone)]
enum Change {
    Link(String, usize),
    Exchange(String, String),
    Rename(String, String),
    Remove(String),
}

#[derive(Clone, Default)]
struct State {
    inodes: Vec<Inode>,
    names: BTreeMap<String, usize>,
    durable_names: BTreeMap<String, usize>,
    /// Changes of names since the last flush, which reach the medium in their order.
    changes: Vec<Change>,
    /// How many operations are left before the power fails.
    left: usize,
    /// Whether the filesystem can exchange names.
    exchanges: bool,
}

fn apply(names: &mut BTreeMap<String, usize>, change: &Change) {
    match change {
        Change::Link(name, inode) => drop(names.insert(name.clone(), *inode)),
        Change::Exchange(one, other) => {
            let (first, second) = (names[one], names[other]);
            names.insert(one.clone(), second);
            names.insert(other.clone(), first);
        }
        Change::Rename(from, to) => {
            let inode = names.remove(from).expect("the name exists");
            names.insert(to.clone(), inode);
        }
        Change::Remove(name) => drop(names.remove(name)),
    }
}

impl State {
    fn operate(&mut self) -> io::Result<()> {
        self.left = self.left.checked_sub(1).ok_or_else(|| io::Error::other("the power failed"))?;
        Ok(())
    }

    fn change(&mut self, change: Change) -> io::Result<()> {
        self.operate()?;
        apply(&mut self.names, &change);
        self.changes.push(change);
        Ok(())
    }

    /// Possible contents of the medium after the power failed.
    fn crashed(&self, random: &mut Random) -> Self {
        let mut names = self.durable_names.clone();
        for change in &self.changes[..random.below(self.changes.len() + 1)] {
            apply(&mut names, change);
        }
        let inodes = self.inodes.iter().map(|inode| torn(inode, random)).collect();
        let durable_names = names.clone();
        Self {
            inodes,
            names,
            durable_names,
            changes: Vec::new(),
            left: usize::MAX,
            exchanges: self.exchanges,
        }
    }
}

/// A file whose length, and each sector, is as at the last flush or the last write.
fn torn(inode: &Inode, random: &mut Random) -> Inode {
    let length = if random.below(2) == 0 { inode.now.len() } else { inode.durable.len() };
    let mut bytes = vec![0; length];
    for (index, sector) in bytes.chunks_mut(SECTOR_BYTES).enumerate() {
        let from = if random.below(2) == 0 { &inode.now } else { &inode.durable };
        for (offset, byte) in sector.iter_mut().enumerate() {
            *byte = from.get(index * SECTOR_BYTES + offset).copied().unwrap_or(0);
        }
    }
    Inode { now: bytes.clone(), durable: bytes }
}

/// A directory in memory.
#[derive(Clone)]
struct SimNames(Rc<RefCell<State>>);

struct SimFile {
    state: Rc<RefCell<State>>,
    inode: usize,
}

impl Names for SimNames {
    type File = SimFile;

    fn open(&self, name: &str, writing: bool) -> io::Result<SimFile> {
        let mut state = self.0.borrow_mut();
        let inode = match state.names.get(name) {
            Some(&inode) => inode,
            None if writing => {
                let inode = state.inodes.len();
                state.inodes.push(Inode::default());
                state.change(Change::Link(name.to_owned(), inode))?;
                inode
            }
            None => return Err(io::ErrorKind::NotFound.into()),
        };
        Ok(SimFile { state: Rc::clone(&self.0), inode })
    }

    fn exchange(&self, one: &str, other: &str) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        if !state.exchanges || !state.names.contains_key(one) || !state.names.contains_key(other) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        state.change(Change::Exchange(one.to_owned(), other.to_owned()))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        if !state.names.contains_key(from) {
            return Err(io::ErrorKind::NotFound.into());
        }
        state.change(Change::Rename(from.to_owned(), to.to_owned()))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        if !state.names.contains_key(name) {
            return Err(io::ErrorKind::NotFound.into());
        }
        state.change(Change::Remove(name.to_owned()))
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.operate()?;
        state.durable_names = state.names.clone();
        state.changes.clear();
        Ok(())
    }
}

impl NamedFile for SimFile {
    fn length(&self) -> io::Result<u64> {
        Ok(self.state.borrow().inodes[self.inode].now.len() as u64)
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        Ok(self.state.borrow().inodes[self.inode].now.clone())
    }

    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.state.borrow_mut();
        state.operate()?;
        let now = &mut state.inodes[self.inode].now;
        let length = now.len().max(bytes.len());
        now.resize(length, 0);
        now[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state.borrow_mut();
        state.operate()?;
        let inode = &mut state.inodes[self.inode];
        inode.durable.clone_from(&inode.now);
        Ok(())
    }

    fn write_in_place(&self) {}
}

fn notes(names: &SimNames) -> DirectoryNotes<'_, SimNames> {
    DirectoryNotes { names, path: Path::new("/simulated") }
}

/// A note of some length that ends in no zero.
fn note(number: usize, random: &mut Random) -> Vec<u8> {
    let length = 1 + random.below(40_000);
    (0..length).map(|index| 1 + ((number * 31 + index) % 255) as u8).collect()
}

/// Writes and clears notes until the power fails, and returns the directory, the note that has to be found and the one
/// that may be.
type Outcome = (SimNames, Option<Vec<u8>>, Option<Option<Vec<u8>>>);

fn run(random: &mut Random, operations: usize) -> Outcome {
    let exchanges = random.below(4) > 0;
    let names = SimNames(Rc::new(RefCell::new(State { left: operations, exchanges, ..State::default() })));
    let mut last = None;
    for number in 0..8 {
        let next = (random.below(5) > 0).then(|| note(number, random));
        let done = match &next {
            Some(bytes) => notes(&names).write(bytes),
            None => notes(&names).clear(),
        };
        match done {
            Ok(()) => last = next,
            Err(_) => return (names, last, Some(next)),
        }
    }
    (names, last, None)
}

#[test]
fn a_note_survives_a_power_cut_after_every_operation() {
    let seeds = std::env::var("MEMASCEND_SEEDS").map_or(12, |seeds| seeds.parse().unwrap());
    let mut cuts = 0;
    for seed in 1..=seeds {
        for operations in 0..60 {
            let mut random = Random(seed * 7919 + 1);
            let (names, last, unfinished) = run(&mut random, operations);
            let allowed = |found: &Option<Vec<u8>>| *found == last || unfinished.as_ref() == Some(found);
            for _ in 0..6 {
                // The process is killed or the power fails; a note that the next process finds stays found.
                let killed = SimNames(Rc::new(RefCell::new(names.0.borrow().clone())));
                killed.0.borrow_mut().left = usize::MAX;
                let cut = SimNames(Rc::new(RefCell::new(names.0.borrow().crashed(&mut random))));
                for left in [killed, cut] {
                    let found = notes(&left).find().unwrap().note;
                    assert!(allowed(&found), "seed {seed}, {operations} operations: another note is found");
                    let again = SimNames(Rc::new(RefCell::new(left.0.borrow().crashed(&mut random))));
                    let still = notes(&again).find().unwrap().note;
                    assert!(
                        still == found,
                        "seed {seed}, {operations} operations: a note that was found is lost"
                    );
                    notes(&again).write(b"after").unwrap();
                    assert_eq!(notes(&again).find().unwrap().note.as_deref(), Some(&b"after"[..]));
                    cuts += 1;
                }
            }
        }
    }
    println!("{cuts} crash states of {seeds} seeds");
    assert!(cuts > 1000, "{cuts} crash states are too few to show anything");
}

#[test]
fn a_note_that_is_too_long_changes_nothing() {
    let names = SimNames(Rc::new(RefCell::new(State { left: usize::MAX, ..State::default() })));
    notes(&names).write(b"a note").unwrap();
    let long = vec![1; usize::try_from(NOTE_BYTES_MAX).unwrap() + 1];
    assert_eq!(notes(&names).write(&long).unwrap_err().errno(), Some(libc::EFBIG));
    assert_eq!(notes(&names).find().unwrap().note.as_deref(), Some(&b"a note"[..]));
    assert!(names.0.borrow().names.contains_key(SPARE_NAME), "room for the next note is there");
}

/// A caller that finds the note damaged has the one before take its place, and then writes the next.
#[test]
fn a_note_before_that_took_the_place_of_a_damaged_one_survives_power_cuts() {
    let mut states = 0;
    for seed in 1..=40 {
        for operations in 0..12 {
            let mut random = Random(seed * 7919 + 1);
            let state = State { left: usize::MAX, exchanges: seed % 4 > 0, ..State::default() };
            let names = SimNames(Rc::new(RefCell::new(state)));
            for bytes in [&b"older"[..], b"before", b"last"] {
                notes(&names).write(bytes).unwrap();
            }
            if seed % 4 == 0 {
                // Without exchanges the room of the note before is cleared.
                assert_eq!(notes(&names).find_before(), None);
                break;
            }
            assert_eq!(notes(&names).find_before().as_deref(), Some(&b"before"[..]));
            names.open(super::Volume::NOTE_NAME, true).unwrap().write(b"lost").unwrap();
            notes(&names).find().unwrap();
            names.0.borrow_mut().left = operations;
            let in_place = notes(&names).put_before_in_place().is_ok();
            let written = in_place && notes(&names).write(b"next").is_ok();
            let cut = SimNames(Rc::new(RefCell::new(names.0.borrow().crashed(&mut random))));
            let (found, before) = (notes(&cut).find().unwrap().note.unwrap(), notes(&cut).find_before());
            match &found[..] {
                b"lost" => assert!(!in_place && before.as_deref() == Some(b"before")),
                b"before" => assert!(!written),
                b"next" => assert!(in_place),
                other => panic!("seed {seed}, {operations} operations: {other:?} is found"),
            }
            states += 1;
        }
    }
    assert!(states > 300, "{states}");
}

/// Another program may have copied the directory a moment ago.
#[test]
fn a_note_that_was_copied_stays_once_it_is_found() {
    let names = SimNames(Rc::new(RefCell::new(State { left: usize::MAX, ..State::default() })));
    names.open(super::Volume::NOTE_NAME, true).unwrap().write(b"copied").unwrap();
    assert_eq!(notes(&names).find().unwrap().note.as_deref(), Some(&b"copied"[..]));
    for seed in 1..100 {
        let cut = SimNames(Rc::new(RefCell::new(names.0.borrow().crashed(&mut Random(seed)))));
        assert_eq!(notes(&cut).find().unwrap().note.as_deref(), Some(&b"copied"[..]));
    }
}
