//! Page-locked memory that the CUDA runtime knows, for every device of the process.

use std::sync::Arc;

use super::parts::Backing;
use super::{HostAllocator, HostBlock, Release, rounded};
use crate::{CudaError, Cudart, MemError, Origin, PAGE_BYTES, Result};

/// The kinds of page-locked memory for a device by name, the preferred one first. This is the only
/// place that prefers one.
///
/// An H200 copied from and to both alike. Only memory that is mapped here lies in huge pages for
/// certain, into which the drives of virtual machines moved about twice as many bytes per second
/// (docs/measurements.md).
pub fn kinds_for_a_device(huge_pages: bool) -> [&'static str; 2] {
    if huge_pages { ["registered", "cuda"] } else { ["cuda", "registered"] }
}

/// The first of [`kinds_for_a_device`] that the system supports.
#[derive(Debug)]
pub(super) struct PreferredAllocator {
    huge_pages: bool,
    cuda: CudaAllocator,
    registered: RegisteredAllocator,
}

impl PreferredAllocator {
    pub(super) fn new(cudart: &Arc<Cudart>, huge_pages: bool) -> Self {
        let registered = RegisteredAllocator { cudart: Arc::clone(cudart), huge_pages, threads: 0 };
        Self { huge_pages, cuda: CudaAllocator::with(Arc::clone(cudart)), registered }
    }

    fn kinds(&self) -> [&dyn HostAllocator; 2] {
        kinds_for_a_device(self.huge_pages).map(|name| match name {
            "registered" => &self.registered as &dyn HostAllocator,
            _ => &self.cuda,
        })
    }
}

impl HostAllocator for PreferredAllocator {
    fn name(&self) -> &'static str {
        self.kinds()[0].name()
    }

    fn allocate(&self, bytes: usize) -> Result<HostBlock> {
        let [preferred, other] = self.kinds();
        match preferred.allocate(bytes) {
            Err(MemError::Cuda(CudaError::NotSupported { .. })) => other.allocate(bytes),
            result => result,
        }
    }

    fn reserve(&self, bytes: usize) -> Result<HostBlock> {
        self.registered.reserve(bytes)
    }
}

/// Page-locked memory of the CUDA runtime, for every device of the process (`cudaHostAlloc`).
#[derive(Debug, Clone)]
pub struct CudaAllocator {
    cudart: Arc<Cudart>,
}

impl CudaAllocator {
    /// Allocates with the CUDA runtime of this process.
    ///
    /// # Errors
    /// As [`Cudart::find`].
    pub fn new() -> Result<Self> {
        Cudart::find().map(Self::with)
    }

    /// Allocates with `cudart`.
    pub fn with(cudart: Arc<Cudart>) -> Self {
        Self { cudart }
    }

    /// A block of `bytes` bytes at the first page in `whole` bytes of CUDA's.
    fn block(&self, bytes: usize, whole: usize) -> Result<HostBlock> {
        let start = self.cudart.host_alloc(whole)?;
        let release = Release::CudaFree(Arc::clone(&self.cudart), start);
        let begin = start.as_ptr().addr();
        let skipped = if whole > bytes { begin.next_multiple_of(PAGE_BYTES) - begin } else { 0 };
        // SAFETY: less than a page is skipped, and there is a page more than the block takes.
        let address = unsafe { start.add(skipped) };
        Ok(HostBlock { address, bytes, release, backing: None, huge_pages: false, origin: Origin::here() })
    }
}

impl HostAllocator for CudaAllocator {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn allocate(&self, bytes: usize) -> Result<HostBlock> {
        let bytes = rounded(bytes)?;
        let mut block = self.block(bytes, bytes)?;
        if !block.address.as_ptr().addr().is_multiple_of(PAGE_BYTES) {
            // CUDA cuts small requests out of larger ones, wherever there is room (seen with 1 MiB and driver 580), and
            // direct I/O needs a page's beginning. Free the first before the next, which may get its place.
            drop(block);
            block = self.block(bytes, bytes.saturating_add(PAGE_BYTES))?;
        }
        // CUDA does not promise zeros.
        block
            .in_parts(0..bytes, 0, |part| {
                // SAFETY: the part lies within the block, which is not shared yet.
                unsafe { block.address().add(part.start).write_bytes(0, part.len()) };
                Ok(())
            })
            .map_err(|source| MemError::Reserve { bytes, source })?;
        Ok(block)
    }
}

/// Anonymous memory that is registered with the CUDA runtime for every device of the process
/// (`cudaHostRegister`).
#[derive(Debug, Clone)]
pub struct RegisteredAllocator {
    /// The runtime to register with.
    pub cudart: Arc<Cudart>,
    /// Whether to ask for huge pages.
    pub huge_pages: bool,
    /// Threads that fault the pages in; 0 means one for each core.
    pub threads: usize,
}

impl HostAllocator for RegisteredAllocator {
    fn name(&self) -> &'static str {
        "registered"
    }

    fn allocate(&self, bytes: usize) -> Result<HostBlock> {
        let mut block = HostBlock::map(bytes, self.huge_pages)?;
        // Registration would fault the pages in on one thread.
        block.populate(0..block.bytes(), self.threads)?;
        // SAFETY: the range is the whole mapping, and the block unregisters it before it unmaps it.
        unsafe { self.cudart.host_register(block.address(), block.bytes()) }?;
        block.release = Release::UnregisterAndUnmap(Arc::clone(&self.cudart));
        Ok(block)
    }

    fn reserve(&self, bytes: usize) -> Result<HostBlock> {
        let backing = Backing::registered(Arc::clone(&self.cudart), self.threads);
        HostBlock::reserve(bytes, self.huge_pages, backing)
    }
}
