//! Allocation: extents for tensors, spare extents for their next values, and the space that each
//! volume lacks.
//!
//! A tensor may lie in several ranges of the address space, so an allocation fails only if the free bytes
//! together are too few, however they are scattered.

use std::sync::Arc;

use memascend_nvme::{BLOCK_BYTES, IoError};

use crate::member::Member;
use crate::table::{Bytes, Table};
use crate::{Extent, Result, Rewrite, Store, StoreError, TensorId};

impl Store {
    /// Allocates `bytes` bytes that belong to no generation. The space is preallocated on every
    /// volume, or on none if the engine moves no bytes. Fragmentation costs no space: the
    /// allocation may consist of several ranges.
    ///
    /// # Errors
    /// If free space and the room to grow are less than `bytes` together.
    pub fn allocate(&self, name: &str, bytes: u64) -> Result<Extent> {
        let mut table = self.table();
        let ranges = self.find_room(&table, bytes)?;
        Ok(table.insert(Bytes::new(name.into(), ranges, None), true))
    }

    /// Frees an extent of [`Store::allocate`].
    ///
    /// # Panics
    /// If it was freed before, or belongs to generations.
    pub fn free(&self, extent: Extent) {
        self.table().free_plain(extent);
    }

    /// Finds ranges for `bytes` bytes and reserves them on the volumes.
    fn find_room(&self, table: &Table, bytes: u64) -> Result<Vec<Extent>> {
        let room = self.room()?;
        let Some(ranges) = table.allocator.find(bytes, self.map.layout.capacity(&room)) else {
            let needed = bytes.next_multiple_of(BLOCK_BYTES as u64);
            let full =
                self.no_room(table, needed, &room).expect("only a full volume limits the address space");
            return Err(full.into());
        };
        let last = ranges.last().expect("a tensor has a range");
        let end = last.end().max(table.allocator.end());
        for (index, member) in self.members.iter().enumerate() {
            if member.engine.needs_room() {
                member.volume.reserve(self.map.layout.share_bytes(index, end))?;
            }
        }
        Ok(ranges)
    }

    /// Creates a tensor whose values belong to generations. Its first value lies in
    /// [`Store::current`]. Names are unique.
    pub fn create_tensor(&self, name: &str, bytes: u64) -> Result<TensorId> {
        let mut table = self.table();
        if table.find_tensor(name).is_some() {
            return Err(StoreError::TensorExists { name: name.to_owned() });
        }
        let name: Arc<str> = name.into();
        let ranges = self.find_room(&table, bytes)?;
        let extent = table.insert(Bytes::new(Arc::clone(&name), ranges, None), false);
        Ok(table.create_tensor(name, extent.offset))
    }

    /// Allocates an extent for another value of a tensor.
    pub(crate) fn allocate_for(&self, table: &mut Table, id: TensorId) -> Result<u64> {
        let current = Arc::clone(table.current(id));
        let ranges = self.find_room(table, current.extent().bytes)?;
        Ok(table.insert(Bytes::new(Arc::clone(&current.name), ranges, None), false).offset)
    }

    /// Allocates the extent of a tensor's next value now, so that no step runs out of space. Does
    /// nothing if the tensor has such a spare already, or if tensors are overwritten in place.
    ///
    /// # Panics
    /// If the tensor was removed.
    pub fn make_spare(&self, id: TensorId) -> Result<()> {
        let mut table = self.table();
        if self.in_place {
            return Ok(());
        }
        for _ in 0..table.spares_lacking(id) {
            let key = self.allocate_for(&mut table, id)?;
            table.add_spare(id, key);
        }
        Ok(())
    }

    /// Bytes that [`Store::make_spare`] would still allocate.
    ///
    /// # Panics
    /// If the tensor was removed.
    pub fn spare_bytes(&self, id: TensorId) -> u64 {
        let table = self.table();
        let lacking = if self.in_place { 0 } else { table.spares_lacking(id) };
        table.current(id).extent().bytes * lacking as u64
    }

    /// Removes a tensor. An extent that no generation holds is free at once; the others are free
    /// when their last generation is superseded by a commit or removed by
    /// [`Store::delete_snapshot`].
    ///
    /// # Panics
    /// If it was removed before.
    pub fn remove_tensor(&self, id: TensorId) {
        self.table().remove_tensor(id);
    }

    /// The tensor named `name`.
    pub fn find_tensor(&self, name: &str) -> Option<TensorId> {
        self.table().find_tensor(name)
    }

    /// Where the present value of a tensor lies.
    ///
    /// # Panics
    /// If it was removed.
    pub fn current(&self, id: TensorId) -> Extent {
        self.table().current(id).extent()
    }

    /// Gives a tensor a new value: the content of [`Rewrite::target`], which the caller writes
    /// completely before the next commit. The target is never an extent of a generation or a
    /// snapshot; with `in_place` the durable generation is given up instead.
    ///
    /// # Panics
    /// If the tensor was removed.
    pub fn rewrite(&self, id: TensorId) -> Result<Rewrite> {
        loop {
            let mut table = self.table();
            let source = table.current(id).extent();
            if !table.is_pinned(id) {
                return Ok(Rewrite { source, target: source });
            }
            if self.in_place && !table.in_snapshot(id) {
                drop(table);
                self.withdraw()?;
                continue;
            }
            let key = match table.take_spare(id) {
                Some(key) => key,
                None => self.allocate_for(&mut table, id)?,
            };
            table.set_current(id, key);
            let target = table.current(id);
            // Its checksums and its resident parts belong to an older value.
            target.sums().clear();
            target.kept().clear();
            return Ok(Rewrite { source, target: target.extent() });
        }
    }

    /// Fails if `bytes` more bytes could not be allocated now, and names the volume that lacks the
    /// space.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        let room = self.room()?;
        self.no_room(&self.table(), bytes, &room).map_or(Ok(()), |error| Err(error.into()))
    }

    /// The volume that has no space for its share of `bytes` more bytes, and how much it lacks.
    fn no_room(&self, table: &Table, bytes: u64, room: &[u64]) -> Option<IoError> {
        let end = table.allocator.end().saturating_add(bytes.saturating_sub(table.allocator.free_bytes()));
        self.members.iter().zip(room).enumerate().find_map(|(index, (member, room))| {
            let used_bytes = self.map.layout.share_bytes(index, table.allocator.end());
            // If a volume has become smaller than the data on it, the address space cannot grow at
            // all.
            let lost_bytes = if end > table.allocator.end() { used_bytes.saturating_sub(*room) } else { 0 };
            let needed_bytes = self.map.layout.share_bytes(index, end) - used_bytes + lost_bytes;
            let free_bytes = room.saturating_sub(used_bytes);
            let path = member.volume.path().to_owned();
            (needed_bytes > free_bytes).then_some(IoError::NoSpace { path, needed_bytes, free_bytes })
        })
    }

    /// Bytes that each volume can hold, those in use included.
    fn room(&self) -> Result<Vec<u64>> {
        let room = |member: &Member| match member.engine.needs_room() {
            true => Ok(member.volume.free_bytes()?.saturating_add(member.volume.reserved_bytes())),
            false => Ok(member.engine.room_bytes().unwrap_or(u64::MAX)),
        };
        self.members.iter().map(room).collect()
    }
}
