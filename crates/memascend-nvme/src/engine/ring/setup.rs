//! Sets a ring up with the features that the kernel has.

use std::io;
use std::sync::Arc;

use io_uring::{IoUring, opcode, types};
use memascend_mem::Pool;

use crate::{EngineOptions, VolumeFile};

/// How long the kernel's submission thread polls for submissions before it sleeps, in milliseconds.
const SQ_POLL_IDLE_MS: u32 = 2;

/// A ring that is not enabled yet.
pub(super) struct Built {
    pub(super) ring: IoUring,
    pub(super) features: Vec<String>,
    /// Whether completions are polled for. Then only direct transfers may be submitted.
    pub(super) polls: bool,
}

/// The ring with as many features as the kernel has. Requested features that the kernel refuses are
/// listed with the reason.
pub(super) fn build(main_file: Option<&Arc<VolumeFile>>, options: EngineOptions) -> io::Result<Built> {
    let mut refused = Vec::new();
    let mut wanted = options;
    if wanted.io_poll
        && let Err(error) =
            main_file.map_or(Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)), |file| probe_io_poll(file))
    {
        wanted.io_poll = false;
        refused.push(format!("no io_poll: {error}"));
    }
    let set_up = |sq_poll: bool, single_issuer: bool, deferred: bool| {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_r_disabled().setup_clamp();
        if wanted.io_poll {
            builder.setup_iopoll();
        }
        if sq_poll {
            builder.setup_sqpoll(SQ_POLL_IDLE_MS);
        } else if deferred {
            builder.setup_defer_taskrun();
        } else if single_issuer {
            builder.setup_coop_taskrun();
        }
        if single_issuer {
            builder.setup_single_issuer();
        }
        // Room for the wake-up read beside the transfers.
        builder.build(u32::try_from(options.depth.max(1) + 2).unwrap_or(u32::MAX))
    };
    let mut attempts = Vec::new();
    if wanted.sq_poll {
        attempts.extend([(true, true, false), (true, false, false)]);
    }
    // Deferred task work needs Linux 6.1, a single issuer 6.0.
    attempts.extend([(false, true, true), (false, true, false), (false, false, false)]);
    let mut last = None;
    for (sq_poll, single_issuer, deferred) in attempts {
        match set_up(sq_poll, single_issuer, deferred) {
            Ok(ring) => {
                if wanted.sq_poll && !sq_poll {
                    refused.push("no sq_poll: the kernel refuses it".to_owned());
                }
                let used = [
                    (wanted.io_poll, "io_poll"),
                    (sq_poll, "sq_poll"),
                    (single_issuer, "single_issuer"),
                    (deferred, "defer_taskrun"),
                ];
                let used = used.iter().filter(|(used, _)| *used).map(|(_, name)| (*name).to_owned());
                let features = used.chain(refused).collect();
                return Ok(Built { ring, features, polls: wanted.io_poll });
            }
            Err(error) => last = Some(error),
        }
    }
    Err(last.expect("something was tried"))
}

/// Whether the device has queues to poll and answers polled reads. Reads a block of the volume
/// through a separate ring.
fn probe_io_poll(file: &VolumeFile) -> io::Result<()> {
    if !file.polls() {
        // An empty file cannot be probed by a read.
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    let block = memascend_mem::PAGE_BYTES;
    let pool = Pool::new(
        &memascend_mem::PageableAllocator::default(),
        &[memascend_mem::SizeClass::new("probe", block, 1)],
    )
    .map_err(io::Error::other)?;
    let lease = pool.try_lease(block).map_err(io::Error::other)?.expect("a fresh pool has a buffer");
    // Declared last, so that the ring is dropped before the buffer.
    let mut ring = IoUring::builder().dontfork().setup_iopoll().build(2)?;
    let read = opcode::Read::new(types::Fd(file.fd()), lease.address().as_ptr(), block as u32)
        .offset(file.position(0))
        .build();
    // SAFETY: the lease outlives the read, which is waited for below.
    unsafe { ring.submission().push(&read) }.map_err(|_| io::Error::other("the queue is full"))?;
    while let Err(error) = ring.submit_and_wait(1) {
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    match ring.completion().next().map(|entry: io_uring::cqueue::Entry| entry.result()) {
        Some(result) if result < 0 => Err(io::Error::from_raw_os_error(-result)),
        _ => Ok(()),
    }
}
