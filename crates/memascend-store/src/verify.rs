//! Reads everything that was committed and compares checksums.

use std::collections::BTreeSet;
use std::sync::{Arc, mpsc};

use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};
use memascend_nvme::{IoError, Operation};

use crate::checksums::SUM_BYTES;
use crate::table::{Bytes, Generation};
use crate::{Damage, Result, Store, StoreError};

/// Reads under way at a time, a MiB each.
const DEPTH: usize = 16;

impl Store {
    /// Reads the durable generation and the snapshots, a few MiB at a time, and returns the damaged bytes:
    /// bytes that differ from the written ones, or cannot be read. Calls `progress` with the bytes read so
    /// far and the bytes to read in total; if it returns false, the verification ends early.
    ///
    /// # Errors
    /// If there is no memory for the buffers.
    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64) -> bool) -> Result<Vec<Damage>> {
        let (held, all) = self.hold_all();
        let read = self.read_all(&all, progress);
        let mut table = self.table();
        held.into_iter().for_each(|generation| table.release(generation, !self.in_place));
        read
    }

    /// Pins all generations, so that their extents stay as they are until the pins are released.
    fn hold_all(&self) -> (Vec<Generation>, Vec<Arc<Bytes>>) {
        let mut table = self.table();
        let held: Vec<Generation> = table
            .durable
            .iter()
            .chain(table.snapshots.iter().map(|snapshot| &snapshot.generation))
            .cloned()
            .collect();
        held.iter().for_each(|generation| table.pin(generation));
        let keys: BTreeSet<u64> =
            held.iter().flat_map(|generation| generation.tensors.iter().map(|(_, key)| *key)).collect();
        let all = keys.iter().map(|key| Arc::clone(table.bytes(*key).expect("pinned"))).collect();
        (held, all)
    }

    fn read_all(
        &self,
        all: &[Arc<Bytes>],
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Vec<Damage>> {
        let class = SizeClass::new("verify", SUM_BYTES as usize, DEPTH);
        let pool = Pool::new(&PageableAllocator { huge_pages: true }, &[class]).map_err(|error| {
            IoError::Directory {
                action: "get memory to verify",
                path: self.members[0].volume.path().to_owned(),
                source: std::io::Error::other(error),
            }
        })?;
        let total: u64 = all.iter().map(|bytes| bytes.extent().bytes).sum();
        let chunks = all.iter().flat_map(|bytes| {
            let length = bytes.extent().bytes;
            (0..length).step_by(SUM_BYTES as usize).map(move |at| (bytes, at, SUM_BYTES.min(length - at)))
        });
        let (sender, receiver) = mpsc::channel();
        let (mut under_way, mut done) = (0, 0);
        let mut damages = Vec::new();
        let mut ended = |(of, offset, bytes, result): (Arc<Bytes>, u64, u64, Result<()>)| {
            match result {
                Ok(()) => {}
                Err(StoreError::Damaged(damage)) => damages.push(damage),
                Err(_) => damages.push(self.map.damage(&of, offset, bytes)),
            }
            done += bytes;
            progress(done, total)
        };
        let mut go_on = true;
        for (of, offset, bytes) in chunks {
            while under_way == DEPTH {
                go_on &= ended(receiver.recv().expect("a sender is here"));
                under_way -= 1;
            }
            if !go_on {
                break;
            }
            let lease = pool
                .try_lease(SUM_BYTES as usize)
                .ok()
                .flatten()
                .expect("fewer are under way than there are");
            let buffer = LeaseSlice::new(Arc::new(lease), 0, bytes as usize);
            let (sender, told) = (sender.clone(), Arc::clone(of));
            let done = Box::new(move |result| drop(sender.send((told, offset, bytes, result))));
            self.submit(Operation::Read, Arc::clone(of), offset, buffer, self.moves(), done);
            under_way += 1;
        }
        while under_way > 0 {
            ended(receiver.recv().expect("a sender is here"));
            under_way -= 1;
        }
        damages.sort_unstable_by(|a, b| (&a.tensor, a.offset).cmp(&(&b.tensor, b.offset)));
        Ok(damages)
    }

    fn moves(&self) -> bool {
        self.members.iter().all(|member| member.engine.moves_bytes())
    }
}
