//! Which store a volume belongs to.

use std::fmt;
use std::io;

use memascend_nvme::{Uuid, parse_uuid, random_uuid};

/// A store's id: a random UUID, written into the manifest on each of the store's volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoreId(Uuid);

impl StoreId {
    /// A new id.
    ///
    /// # Errors
    /// If the kernel gives no random bytes.
    pub(crate) fn random() -> io::Result<Self> {
        random_uuid().map(Self)
    }

    /// The id that `text` names, or `None` if it is no UUID.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        parse_uuid(text).ok().map(Self)
    }
}

impl fmt::Display for StoreId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(out)
    }
}
