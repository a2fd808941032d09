//! Tests of the engine on other programs' files.

use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::mpsc;
use std::time::Duration;

use super::*;
use proptest::prelude::*;

fn engines() -> [FileEngine; 2] {
    [EngineChoice::Auto, EngineChoice::Threads]
        .map(|choice| FileEngine::new(EngineOptions { choice, ..EngineOptions::default() }).unwrap())
}

/// Memory that begins `skew` bytes behind a page.
struct Memory {
    bytes: Vec<u8>,
    start: usize,
}

impl Memory {
    fn new(skew: usize, content: &[u8]) -> Self {
        let mut bytes = vec![0; content.len() + skew + PAGE_BYTES];
        let start = bytes.as_ptr().addr().next_multiple_of(PAGE_BYTES) - bytes.as_ptr().addr() + skew;
        bytes[start..start + content.len()].copy_from_slice(content);
        Self { bytes, start }
    }

    fn slice(&mut self, bytes: usize) -> LeaseSlice {
        let address = NonNull::new(self.bytes[self.start..].as_mut_ptr()).unwrap();
        // SAFETY: the tests wait for transfers before they drop the memory.
        unsafe { LeaseSlice::of_caller(address, bytes) }
    }

    fn content(&self, bytes: usize) -> &[u8] {
        &self.bytes[self.start..self.start + bytes]
    }
}

fn run(
    engine: &FileEngine,
    operation: Operation,
    path: &Path,
    offset: usize,
    memory: &mut Memory,
    bytes: usize,
) -> Result<()> {
    let (sender, receiver) = mpsc::channel();
    let on_end: OnEnd = Box::new(move |result| sender.send(result).unwrap());
    engine.submit(operation, path, offset as u64, &memory.slice(bytes), on_end);
    receiver.recv_timeout(Duration::from_secs(30)).expect("every transfer ends")
}

fn write(engine: &FileEngine, path: &Path, offset: usize, content: &[u8]) -> Result<()> {
    run(engine, Operation::Write, path, offset, &mut Memory::new(0, content), content.len())
}

fn read(engine: &FileEngine, path: &Path, offset: usize, bytes: usize) -> Result<Vec<u8>> {
    let mut memory = Memory::new(0, &vec![0; bytes]);
    run(engine, Operation::Read, path, offset, &mut memory, bytes)?;
    Ok(memory.content(bytes).to_vec())
}

fn noise(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index * 31 + index / 251 + seed * 7) as u8).collect()
}

#[test]
fn pages_are_cut_out_of_a_transfer() {
    let geometry = Some(Geometry { block_bytes: 512, memory_bytes: 512, part_bytes: 1 << 20 });
    let page = PAGE_BYTES;
    for (offset, address, bytes, expected) in [
        (0, 0, 3 * page, (0, 3 * page)),
        (0, 512, 3 * page, (0, 3 * page)),
        (0, 64, 3 * page, (3 * page, 0)),
        (0, 0, 3 * page + 100, (0, 3 * page)),
        (512, 512, 3 * page, (page - 512, 2 * page)),
        (100, 100, 3 * page, (page - 100, 2 * page)),
        (100, 0, 3 * page, (3 * page, 0)),
        (0, 0, page - 1, (page - 1, 0)),
        (1, 1, page, (page, 0)),
        (page as u64 - 1, page - 1, page, (page, 0)),
        (page as u64 - 1, page - 1, page + 1, (1, page)),
    ] {
        let cut = Cut::of(offset, address, bytes, geometry);
        assert_eq!((cut.before, cut.pages), expected, "offset {offset}, address {address}, {bytes} bytes");
    }
    assert_eq!(Cut::of(0, 0, page, None), Cut { before: page, pages: 0 });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Writes and reads at any offset from any address give the bytes of a plain file.
    #[test]
    fn a_file_holds_what_was_written(
        threads in any::<bool>(),
        transfers in prop::collection::vec(
            (any::<bool>(), 0_usize..40_000, 0_usize..1024, 1_usize..40_000), 1..12),
    ) {
        let engine = &engines()[usize::from(threads)];
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut model: Vec<u8> = Vec::new();
        for (index, (writes, offset, skew, bytes)) in transfers.into_iter().enumerate() {
            // Half of the addresses are aligned as their offsets are.
            let skew = if skew % 2 == 0 { offset % PAGE_BYTES } else { skew };
            let end = offset + bytes;
            if writes {
                let content = noise(bytes, index);
                let mut memory = Memory::new(skew, &content);
                run(engine, Operation::Write, &path, offset, &mut memory, bytes).unwrap();
                if model.len() < end {
                    model.resize(end, 0);
                }
                model[offset..end].copy_from_slice(&content);
            } else {
                let mut memory = Memory::new(skew, &vec![0; bytes]);
                let result = run(engine, Operation::Read, &path, offset, &mut memory, bytes);
                prop_assert_eq!(result.is_ok(), end <= model.len());
                if end <= model.len() {
                    prop_assert_eq!(memory.content(bytes), &model[offset..end]);
                }
            }
        }
        if !model.is_empty() {
            prop_assert_eq!(std::fs::read(&path).unwrap(), model);
        }
    }
}

#[test]
fn neighbours_are_written_at_once() {
    for engine in engines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let content = noise(600_000, 3);
        // Parts that share pages at their borders.
        let mut parts: Vec<_> = content.chunks(7001).map(|part| Memory::new(0, part)).collect();
        let (sender, receiver) = mpsc::channel();
        for round in 0..3 {
            for (index, memory) in parts.iter_mut().enumerate() {
                let bytes = 7001.min(content.len() - index * 7001);
                let sender = sender.clone();
                let on_end: OnEnd = Box::new(move |result| sender.send(result).unwrap());
                engine.submit(Operation::Write, &path, index as u64 * 7001, &memory.slice(bytes), on_end);
            }
            for _ in &parts {
                receiver.recv_timeout(Duration::from_secs(30)).unwrap().unwrap();
            }
            assert_eq!(read(&engine, &path, 0, content.len()).unwrap(), content, "round {round}");
        }
    }
}

#[test]
fn a_file_that_was_replaced_is_opened_again() {
    for engine in engines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        write(&engine, &path, 0, &noise(9000, 1)).unwrap();
        std::fs::remove_file(&path).unwrap();
        let missing = read(&engine, &path, 0, 9000).unwrap_err();
        assert_eq!(missing.errno(), Some(libc::ENOENT), "{missing}");
        std::fs::write(&path, noise(9000, 2)).unwrap();
        assert_eq!(read(&engine, &path, 0, 9000).unwrap(), noise(9000, 2));
        // In place, as a checkpoint that is copied back.
        std::fs::write(&path, noise(8192, 4)).unwrap();
        assert_eq!(read(&engine, &path, 0, 8192).unwrap(), noise(8192, 4));
    }
}

#[test]
fn a_file_that_was_cut_off_is_an_error() {
    for engine in engines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        write(&engine, &path, 0, &noise(20_000, 1)).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(5000).unwrap();
        let error = read(&engine, &path, 0, 20_000).unwrap_err();
        assert!(error.to_string().contains("made shorter"), "{error}");
        // Writing behind the end would leave zeros before it.
        let error = write(&engine, &path, 16_384, &noise(3616, 1)).unwrap_err();
        assert!(error.to_string().contains("made shorter"), "{error}");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 5000);
        // Writing all of it makes it whole.
        write(&engine, &path, 0, &noise(20_000, 5)).unwrap();
        assert_eq!(read(&engine, &path, 0, 20_000).unwrap(), noise(20_000, 5));

        let short = directory.path().join("short");
        std::fs::write(&short, [1; 100]).unwrap();
        let error = read(&engine, &short, 50, 100).unwrap_err();
        assert!(error.to_string().contains("the file is shorter"), "{error}");
    }
}

#[test]
fn what_only_may_be_read_is_read() {
    for engine in engines() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, noise(10_000, 1)).unwrap();
        let mut permissions = std::fs::metadata(&path).unwrap().permissions();
        permissions.set_readonly(true);
        std::fs::set_permissions(&path, permissions).unwrap();
        assert_eq!(read(&engine, &path, 3, 9000).unwrap(), noise(10_000, 1)[3..9003]);
    }
}

#[test]
fn many_files_take_few_descriptors() {
    for engine in engines() {
        let directory = tempfile::tempdir().unwrap();
        let path = |index: usize| directory.path().join(index.to_string());
        for index in 0..OPEN_FILES + 50 {
            write(&engine, &path(index), 0, &noise(5000, index)).unwrap();
        }
        assert!(engine.lock().by_path.len() <= OPEN_FILES);
        for index in (0..OPEN_FILES + 50).rev() {
            assert_eq!(read(&engine, &path(index), 0, 5000).unwrap(), noise(5000, index));
        }
    }
}

#[test]
fn errors_name_the_file() {
    for engine in engines() {
        let missing = Path::new("/nonexistent/file");
        let error = write(&engine, missing, 0, &[1; 10]).unwrap_err();
        assert_eq!(error.path(), Some(missing), "{error}");
        assert_eq!(error.errno(), Some(libc::ENOENT));
        let error = read(&engine, Path::new("/proc/self/mem"), 0, 4096).unwrap_err();
        assert_eq!(error.path(), Some(Path::new("/proc/self/mem")), "{error}");
    }
}

#[test]
fn an_empty_transfer_ends_at_once() {
    for engine in engines() {
        let path = Path::new("/nonexistent/file");
        run(&engine, Operation::Read, path, 0, &mut Memory::new(0, &[]), 0).unwrap();
    }
}

#[test]
fn a_forked_child_is_refused() {
    let engine = &engines()[0];
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    std::fs::File::create(&path).unwrap().write_all_at(&[7; 100], 0).unwrap();
    // SAFETY: the child makes one call that must not wait, and leaves.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let refused = read(engine, &path, 0, 100).is_err();
        // SAFETY: leaves without running anything of the parent's.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(status, 0);
}
