use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::engine::run_callback;
use crate::{Completion, Counters, CountersSnapshot, Engine, IoError, Operation, Request};

/// pread and pwrite on a few threads, for systems that refuse io_uring.
pub struct ThreadsEngine {
    queue: Option<Sender<Request>>,
    threads: Vec<JoinHandle<()>>,
    counters: Arc<Counters>,
    owner_pid: u32,
}

impl ThreadsEngine {
    /// Threads used when nobody asks otherwise: enough to keep a SATA or NVMe drive's queue from emptying.
    pub const DEFAULT_THREADS: usize = 8;

    /// Starts `threads` I/O threads (at least one).
    pub fn new(threads: usize) -> Self {
        let (queue, requests) = unbounded::<Request>();
        let counters = Arc::new(Counters::default());
        let threads = (0..threads.max(1))
            .map(|index| {
                let (requests, counters) = (requests.clone(), Arc::clone(&counters));
                std::thread::Builder::new()
                    .name(format!("memascend-io-{index}"))
                    .spawn(move || serve(&requests, &counters))
                    .expect("the system can start a thread")
            })
            .collect();
        Self { queue: Some(queue), threads, counters, owner_pid: std::process::id() }
    }
}

fn serve(requests: &Receiver<Request>, counters: &Counters) {
    for request in requests {
        let Request { operation, file, offset, buffer, on_complete } = request;
        let result = transfer_all(operation, file.fd(), offset, buffer.address().as_ptr(), buffer.bytes())
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
        "threads"
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
}

impl Drop for ThreadsEngine {
    fn drop(&mut self) {
        // The threads did not come along into a forked child: there is nobody to wake or to join.
        if self.owner_pid != std::process::id() {
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
