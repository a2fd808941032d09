//! The arena as registered buffers of the ring.

use std::ops::Range;

use memascend_mem::{LockExt, Pool};

use super::driver::{Driver, Enabled};
use crate::engine::registered::Registered;

impl Driver {
    /// Registers an arena; whether its changes are to be told.
    pub(super) fn register(&mut self, ring: &Enabled<'_>, pool: Pool) -> bool {
        if self.arena.is_some() {
            return false;
        }
        let elastic = pool.is_elastic();
        let (registered, feature) = match Registered::new(&ring.submitter, pool) {
            Ok(registered) => (Some(registered), "registered_buffers".into()),
            Err(error) if elastic => (
                None,
                format!("no registered_buffers: memory that grows and shrinks needs a sparse table: {error}"),
            ),
            Err(error) => (None, format!("no registered_buffers: {error}")),
        };
        let listens = elastic && registered.is_some();
        self.arena = registered;
        let mut features = self.features.locked();
        features.push(feature);
        if listens {
            features.push("sparse_buffers".into());
        }
        listens
    }

    /// Has the ring know which parts of the registered arena are memory.
    pub(super) fn memory_changed(&mut self, ring: &Enabled<'_>, parts: &[Range<usize>], committed: bool) {
        let Some(arena) = &mut self.arena else { return };
        if committed {
            if let Err(error) = arena.committed(&ring.submitter, parts) {
                let refused = format!("some buffers are not registered: {error}");
                let mut features = self.features.locked();
                if !features.contains(&refused) {
                    features.push(refused);
                }
            }
        } else if let Err(error) = arena.leaving(&ring.submitter, parts) {
            self.features.locked().push(format!("some memory stays pinned: {error}"));
        }
    }
}
