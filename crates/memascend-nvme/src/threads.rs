use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use memascend_mem::Origin;

use crate::engine::run_callback;
use crate::{Completion, Counters, CountersSnapshot, Engine, IoError, Operation, Request};

/// pread and pwrite on a few threads, for systems that refuse io_uring.
pub struct ThreadsEngine {
    kind: &'static Kind,
    queue: Option<Sender<Request>>,
    threads: Vec<JoinHandle<()>>,
    counters: Arc<Counters>,
    origin: Origin,
}

impl ThreadsEngine {
    /// Threads used when nobody asks otherwise: enough to keep a SATA or NVMe drive's queue from emptying.
    pub const DEFAULT_THREADS: usize = 8;

    /// Starts `threads` I/O threads (at least one).
    pub fn new(threads: usize) -> Self {
        Self::of(&MOVING, threads)
    }

    /// Completes every request at once, on a thread of its own, and moves nothing: for replaying the schedule of a model
    /// that neither the volumes nor the host memory could hold. What was read is whatever the buffer held before, so
    /// nothing computed on it means anything.
    pub fn null() -> Self {
        Self::of(&NULL, 1)
    }

    fn of(kind: &'static Kind, threads: usize) -> Self {
        let (queue, requests) = unbounded::<Request>();
        let counters = Arc::new(Counters::default());
        let threads = (0..threads.max(1))
            .map(|index| {
                let (requests, counters) = (requests.clone(), Arc::clone(&counters));
                std::thread::Builder::new()
                    .name(format!("memascend-io-{index}"))
                    .spawn(move || serve(kind.transfer, &requests, &counters))
                    .expect("the system can start a thread")
            })
            .collect();
        Self { kind, queue: Some(queue), threads, counters, origin: Origin::here() }
    }
}

/// What is done with a request, and whether room for it has to be found.
struct Kind {
    name: &'static str,
    needs_room: bool,
    transfer: Transfer,
}

type Transfer = fn(Operation, i32, u64, *mut u8, usize) -> io::Result<()>;

static MOVING: Kind = Kind { name: "threads", needs_room: true, transfer: transfer_all };
static NULL: Kind = Kind { name: "null", needs_room: false, transfer: |_, _, _, _, _| Ok(()) };

fn serve(transfer: Transfer, requests: &Receiver<Request>, counters: &Counters) {
    for request in requests {
        let Request { operation, file, offset, buffer, on_complete } = request;
        let result = transfer(operation, file.fd(), offset, buffer.address().as_ptr(), buffer.bytes())
            .map_err(|source| IoError::Transfer {
                operation,
                path: file.path().to_owned(),
                offset,
                bytes: buffer.bytes(),
                source,
            });
        if result.is_ok() {
            counters.add(operation, buffer.bytes());
        }
        run_callback(on_complete, Completion { buffer, result });
    }
}

fn transfer_all(
    operation: Operation,
    fd: i32,
    offset: u64,
    address: *mut u8,
    bytes: usize,
) -> io::Result<()> {
    let mut done = 0;
    while done < bytes {
        let position = i64::try_from(offset).expect("offsets fit in i64") + done as i64;
        // SAFETY: `done < bytes`, so the remaining range lies inside the request's buffer, which the request
        // owns until this function returns.
        let moved = unsafe {
            match operation {
                Operation::Read => libc::pread(fd, address.add(done).cast(), bytes - done, position),
                Operation::Write => libc::pwrite(fd, address.add(done).cast(), bytes - done, position),
            }
        };
        match moved {
            0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            moved if moved > 0 => done += resumable(moved as usize, bytes - done),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

/// How far a transfer of `left` bytes that moved `moved` may be resumed from: the last whole block.
pub(crate) fn resumable(moved: usize, left: usize) -> usize {
    if moved >= left { left } else { moved / crate::BLOCK_BYTES * crate::BLOCK_BYTES }
}

impl Engine for ThreadsEngine {
    fn name(&self) -> &'static str {
        self.kind.name
    }

    fn submit(&self, request: Request) {
        let queue = self.queue.as_ref().expect("the queue lives until drop");
        if let Err(refused) = queue.send(request) {
            let Request { buffer, on_complete, .. } = refused.0;
            on_complete(Completion { buffer, result: Err(IoError::Closed) });
        }
    }

    fn counters(&self) -> CountersSnapshot {
        self.counters.snapshot()
    }

    fn needs_room(&self) -> bool {
        self.kind.needs_room
    }
}

impl Drop for ThreadsEngine {
    fn drop(&mut self) {
        // The threads did not come along into a forked child: there is nobody to wake or to join.
        if !self.origin.is_here() {
            return;
        }
        self.queue = None;
        for thread in self.threads.drain(..) {
            // The engine may be dropped by a completion running on one of its own threads.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};

    use super::*;
    use crate::{Operation, Volume};

    #[test]
    fn requests_end_on_another_thread_and_are_counted_but_move_nothing() {
        const BYTES: usize = 8192;
        let directory = tempfile::tempdir().unwrap();
        let volume = Volume::create(directory.path(), false).unwrap();
        let class = SizeClass { consumer: "test".into(), bytes: BYTES, count: 1 };
        let pool = Pool::new(&PageableAllocator, &[class]).unwrap();
        let engine = ThreadsEngine::null();
        for operation in [Operation::Write, Operation::Read] {
            let buffer = LeaseSlice::new(Arc::new(pool.try_lease(BYTES).unwrap().unwrap()), 0, BYTES);
            // SAFETY: the only handle to the buffer.
            unsafe { buffer.as_mut_slice() }.fill(7);
            let (sender, receiver) = mpsc::channel();
            engine.submit(Request {
                operation,
                file: Arc::clone(volume.file()),
                offset: 1 << 40,
                buffer,
                on_complete: Box::new(move |completion| {
                    sender.send((std::thread::current().id(), completion)).unwrap();
                }),
            });
            let (thread, Completion { buffer, result }) = receiver.recv().unwrap();
            result.unwrap();
            assert_ne!(thread, std::thread::current().id());
            // SAFETY: the request has ended and gave the only handle back.
            assert!(unsafe { buffer.as_slice() }.iter().all(|byte| *byte == 7));
        }
        let counted = CountersSnapshot { bytes_read: 8192, bytes_written: 8192, requests: 2 };
        assert_eq!(engine.counters(), counted);
        assert_eq!(std::fs::metadata(volume.file().path()).unwrap().len(), 0);
    }
}
