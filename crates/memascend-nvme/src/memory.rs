//! Memory of a size that a file, a drive or a user decides on: its lack is an error, and does not end the process.

use std::io;

/// An empty vector with room for so many elements.
///
/// # Errors
/// ENOMEM.
pub fn with_room<T>(elements: usize) -> io::Result<Vec<T>> {
    let mut vector = Vec::new();
    vector.try_reserve_exact(elements).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
    Ok(vector)
}

/// A copy of `bytes`.
///
/// # Errors
/// ENOMEM.
pub fn copy_of(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut copy = with_room(bytes.len())?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}

/// Text or bytes that grow as they are written.
///
/// Its errors are ENOMEM.
#[derive(Debug, Default)]
pub struct Growing(pub Vec<u8>);

impl io::Write for Growing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_reserve(bytes.len()).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
