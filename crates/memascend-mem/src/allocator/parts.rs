//! Blocks that reserve addresses: memory comes behind their parts, and goes again, while the
//! addresses stay.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use super::HostBlock;
use crate::sync::LockExt;
use crate::{Cudart, MemError, Result};

/// The kind of memory that is put behind the parts of a block.
#[derive(Debug)]
pub(super) enum Backing {
    Pageable,
    Locked {
        threads: usize,
    },
    /// Each part is registered by itself, since CUDA unregisters only ranges as they were registered.
    Registered {
        cudart: Arc<Cudart>,
        threads: usize,
        /// Where the registered parts begin.
        parts: Mutex<BTreeSet<usize>>,
    },
}

impl Backing {
    pub(super) fn registered(cudart: Arc<Cudart>, threads: usize) -> Self {
        Self::Registered { cudart, threads, parts: Mutex::default() }
    }
}

impl HostBlock {
    /// Addresses without memory. They cannot be read or written, and no forked child has them.
    pub(super) fn reserve(bytes: usize, huge_pages: bool, backing: Backing) -> Result<Self> {
        let mut block = Self::map_for(libc::PROT_NONE, bytes, huge_pages)?;
        block.backing = Some(backing);
        Ok(block)
    }

    /// Asks for huge pages behind a part of a reserved block, before it is committed, if the block may
    /// have them. The part is never to be given back: the system takes nothing less than a whole huge
    /// page back, but under pressure.
    pub fn use_huge_pages(&self, part: Range<usize>) {
        if self.huge_pages {
            self.ask_for_huge_pages(part);
        }
    }

    /// Whether the block was only reserved, so that [`HostBlock::commit`] can be called.
    pub fn is_reserved(&self) -> bool {
        self.backing.is_some()
    }

    /// Puts memory, all zeros, behind parts of a reserved block that have none: whole pages, by
    /// ascending address. All of them get it, or none. It is resident when this returns.
    ///
    /// # Errors
    /// If the system refuses the memory, to lock it, or to register it.
    ///
    /// # Panics
    /// If the block was allocated whole.
    pub fn commit(&self, parts: &[Range<usize>]) -> Result<()> {
        let backing = self.backing.as_ref().expect("only a reserved block is committed in parts");
        let joined = join(parts);
        for (index, part) in joined.iter().enumerate() {
            if let Err(error) = self.commit_part(backing, part.clone()) {
                // Nothing refers to the parts: a part that cannot be discarded goes with the block.
                joined[..=index].iter().for_each(|part| drop(self.discard(part.clone())));
                let bytes = joined.iter().map(ExactSizeIterator::len).sum();
                return Err(error.of_bytes(bytes));
            }
        }
        let Backing::Registered { cudart, parts: registered, .. } = backing else { return Ok(()) };
        let mut registered = registered.locked();
        for (index, part) in parts.iter().enumerate() {
            // SAFETY: the part is mapped and has memory. It is unregistered before that goes.
            match unsafe { cudart.host_register(self.at(part.start), part.len()) } {
                Ok(()) => drop(registered.insert(part.start)),
                Err(error) => {
                    let undo = |part: &Range<usize>| cudart.host_unregister(self.at(part.start)).is_ok();
                    let (mine, others) = parts.split_at(index);
                    for part in mine.iter().filter(|part| undo(part)).chain(others) {
                        registered.remove(&part.start);
                        let _ = self.discard(part.clone());
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Gives the memory of a part back to the system: one of the parts given to
    /// [`HostBlock::commit`], to which nothing refers. Its addresses stay reserved.
    ///
    /// # Errors
    /// If the system or CUDA refuses; the part is memory as before then, but may have become zeros.
    ///
    /// # Panics
    /// If the block was allocated whole.
    pub fn give_back(&self, part: Range<usize>) -> Result<()> {
        let backing = self.backing.as_ref().expect("only parts of a reserved block are given back");
        if let Backing::Registered { cudart, parts, .. } = backing {
            let mut parts = parts.locked();
            cudart.host_unregister(self.at(part.start))?;
            parts.remove(&part.start);
        }
        let bytes = part.len();
        self.discard(part.clone()).map_err(|source| {
            // Some of it may be unlocked or unregistered. It is used as it is: transfers still work.
            MemError::GiveBack { bytes, source }
        })
    }

    /// Unregisters every part that is registered; false if CUDA refuses one.
    pub(super) fn parts_are_unregistered(&self) -> bool {
        let Some(Backing::Registered { cudart, parts, .. }) = &self.backing else { return true };
        let mut parts = parts.locked();
        parts.retain(|start| cudart.host_unregister(self.at(*start)).is_err());
        parts.is_empty()
    }

    fn commit_part(&self, backing: &Backing, part: Range<usize>) -> Result<()> {
        self.protect(part.clone(), libc::PROT_READ | libc::PROT_WRITE)
            .map_err(|source| MemError::Reserve { bytes: part.len(), source })?;
        match backing {
            // A growing budget must learn at once how much the system gives: a page that is missing later, in
            // mid-step, costs the process.
            Backing::Pageable => self.populate(part, 0),
            Backing::Locked { threads } => {
                self.lock_on_fault(part.clone())?;
                self.populate(part, *threads)
            }
            // Registration would fault the pages in on one thread.
            Backing::Registered { threads, .. } => self.populate(part, *threads),
        }
    }

    /// Unlocks a part, returns its pages to the system, and lets nothing touch its addresses.
    fn discard(&self, part: Range<usize>) -> io::Result<()> {
        let (address, bytes) = (self.at(part.start).as_ptr().cast(), part.len());
        // SAFETY: the part lies within the block's mapping, and nothing refers to it.
        let gone = unsafe {
            libc::munlock(address, bytes) == 0 && libc::madvise(address, bytes, libc::MADV_DONTNEED) == 0
        };
        if !gone {
            return Err(io::Error::last_os_error());
        }
        // The pages are gone whether or not the addresses can be closed.
        let _ = self.protect(part, libc::PROT_NONE);
        Ok(())
    }

    fn protect(&self, part: Range<usize>, protection: libc::c_int) -> io::Result<()> {
        // SAFETY: the part lies within the block's mapping, and nothing refers to it.
        match unsafe { libc::mprotect(self.at(part.start).as_ptr().cast(), part.len(), protection) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.bytes, "{offset} is outside of a block of {} bytes", self.bytes);
        // SAFETY: within the mapping, as was just checked.
        unsafe { self.address.add(offset) }
    }
}

/// The parts with those joined that touch.
fn join(parts: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for part in parts {
        match joined.last_mut() {
            Some(last) if last.end == part.start => last.end = part.end,
            _ => joined.push(part.clone()),
        }
    }
    joined
}

impl MemError {
    /// The same refusal, reported for all `bytes` bytes that were requested.
    fn of_bytes(self, bytes: usize) -> Self {
        match self {
            Self::Lock { limit_bytes, source, .. } => Self::Lock { bytes, limit_bytes, source },
            Self::Reserve { source, .. } => Self::Reserve { bytes, source },
            other => other,
        }
    }
}
