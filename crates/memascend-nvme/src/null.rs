use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};

use crate::engine::run_callback;
use crate::{Completion, Counters, CountersSnapshot, Engine, IoError, Request};

/// Completes every request at once and moves nothing: for replaying the schedule of a model that neither the
/// volumes nor the host memory could hold. What was read is whatever the buffer held before, so nothing
/// computed on it means anything.
pub struct NullEngine {
    queue: Option<Sender<Request>>,
    thread: Option<JoinHandle<()>>,
    counters: Arc<Counters>,
    owner_pid: u32,
}

impl NullEngine {
    /// Starts the thread that completes requests. Like any other engine it never completes one inside `submit`,
    /// so that locks are taken in the same order and buffers are held as long as a transfer is under way.
    pub fn new() -> Self {
        let (queue, requests) = unbounded::<Request>();
        let counters = Arc::new(Counters::default());
        let counted = Arc::clone(&counters);
        let thread = std::thread::Builder::new()
            .name("memascend-null".into())
            .spawn(move || {
                for Request { operation, buffer, on_complete, .. } in requests {
                    counted.add(operation, buffer.bytes());
                    run_callback(on_complete, Completion { buffer, result: Ok(()) });
                }
            })
            .expect("the system can start a thread");
        Self { queue: Some(queue), thread: Some(thread), counters, owner_pid: std::process::id() }
    }
}

impl Default for NullEngine {
    fn default() -> Self {
        Self::new()
    }
}

impl Engine for NullEngine {
    fn name(&self) -> &'static str {
        "null"
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
        false
    }
}

impl Drop for NullEngine {
    fn drop(&mut self) {
        // The thread did not come along into a forked child.
        if self.owner_pid != std::process::id() {
            return;
        }
        self.queue = None;
        // The engine may be dropped by a completion running on its own thread.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
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
        let engine = NullEngine::new();
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
