//! Room for tensors: extents that are found and reserved, spares for next values, and what is given back.

use std::sync::Arc;

use memascend_nvme::{BLOCK_BYTES, IoError};

use crate::member::Member;
use crate::table::{Bytes, Table};
use crate::{Extent, Result, Rewrite, Store, StoreError, TensorId};

impl Store {
    /// Room for `bytes` bytes that belong to no generation, preallocated on every volume (on none if the engine moves nothing).
    /// Only if free space and what the volumes can grow are too little together does it fail: no space is lost to fragmentation.
    pub fn allocate(&self, name: &str, bytes: u64) -> Result<Extent> {
        let mut table = self.table();
        let ranges = self.find_room(&table, bytes)?;
        Ok(table.insert(Bytes::new(name.into(), ranges, None), true))
    }

    /// Gives back what was allocated.
    ///
    /// # Panics
    /// If it was given back before, or belongs to generations.
    pub fn free(&self, extent: Extent) {
        self.table().free_plain(extent);
    }

    /// Ranges for `bytes` bytes, reserved on the volumes.
    fn find_room(&self, table: &Table, bytes: u64) -> Result<Vec<Extent>> {
        let room = self.room()?;
        let Some(ranges) = table.allocator.find(bytes, self.map.layout.capacity(&room)) else {
            let needed = bytes.next_multiple_of(BLOCK_BYTES as u64);
            let full = self.no_room(table, needed, &room).expect("a volume is what limits the address space");
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

    /// A tensor whose values belong to generations; the first lies in its extent by [`Store::current`]. Names are unique.
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

    /// An extent for another value of a tensor.
    pub(crate) fn allocate_for(&self, table: &mut Table, id: TensorId) -> Result<u64> {
        let current = Arc::clone(table.current(id));
        let ranges = self.find_room(table, current.extent().bytes)?;
        Ok(table.insert(Bytes::new(Arc::clone(&current.name), ranges, None), false).offset)
    }

    /// Makes room for the next generation of a tensor now, so that no step runs out of space. Nothing where it has it, or
    /// where tensors are overwritten in place.
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

    /// Bytes that [`Store::make_spare`] would still take.
    ///
    /// # Panics
    /// If the tensor was removed.
    pub fn spare_bytes(&self, id: TensorId) -> u64 {
        let table = self.table();
        let lacking = if self.in_place { 0 } else { table.spares_lacking(id) };
        table.current(id).extent().bytes * lacking as u64
    }

    /// Removes a tensor. Its extents are free at once where no generation has them, else when the last of those is gone: the
    /// next commit supersedes one, [`Store::delete_snapshot`] takes others away.
    ///
    /// # Panics
    /// If it was removed before.
    pub fn remove_tensor(&self, id: TensorId) {
        self.table().remove_tensor(id);
    }

    /// The tensor of that name.
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

    /// A tensor gets a new value: from now on it is what [`Rewrite::target`] holds, all of which is to be written before the
    /// next commit. What a generation or a snapshot has is never the target; with `in_place` the generation goes
    /// instead.
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
            // Nothing of what it held before is right any more once a part of it is written.
            target.sums().clear();
            return Ok(Rewrite { source, target: target.extent() });
        }
    }

    /// Fails with the volume that lacks the room if `bytes` more bytes could not be allocated now.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        let room = self.room()?;
        self.no_room(&self.table(), bytes, &room).map_or(Ok(()), |error| Err(error.into()))
    }

    /// Which volume lacks how much for `bytes` more bytes, if one does.
    fn no_room(&self, table: &Table, bytes: u64, room: &[u64]) -> Option<IoError> {
        let end = table.allocator.end().saturating_add(bytes.saturating_sub(table.allocator.free_bytes()));
        self.members.iter().zip(room).enumerate().find_map(|(index, (member, room))| {
            let used_bytes = self.map.layout.share_bytes(index, table.allocator.end());
            // A volume that has become smaller than what lies on it lets nothing grow, wherever the growth would be.
            let lost_bytes = if end > table.allocator.end() { used_bytes.saturating_sub(*room) } else { 0 };
            let needed_bytes = self.map.layout.share_bytes(index, end) - used_bytes + lost_bytes;
            let free_bytes = room.saturating_sub(used_bytes);
            let path = member.volume.path().to_owned();
            (needed_bytes > free_bytes).then_some(IoError::NoSpace { path, needed_bytes, free_bytes })
        })
    }

    /// How many bytes each volume can have, with those it has.
    fn room(&self) -> Result<Vec<u64>> {
        let room = |member: &Member| match member.engine.needs_room() {
            true => Ok(member.volume.free_bytes()?.saturating_add(member.volume.reserved_bytes())),
            false => Ok(member.engine.room_bytes().unwrap_or(u64::MAX)),
        };
        self.members.iter().map(room).collect()
    }
}
