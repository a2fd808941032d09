//! Tests of volumes in directories.

use super::*;

#[test]
fn reserving_more_than_the_disk_has_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let volume = Volume::create(directory.path(), true).unwrap();
    volume.reserve(8192).unwrap();
    let error = volume.reserve(1 << 60).unwrap_err();
    assert!(matches!(error, IoError::NoSpace { .. }));
    assert_eq!(error.errno(), Some(libc::ENOSPC));
    assert!(error.to_string().contains(": 1048576.00 TiB (1152921504606838784 bytes) needed, "), "{error}");
    assert_eq!(std::fs::metadata(volume.file().path()).unwrap().len(), 8192);
}

/// A write behind the end would make the file as long again, with zeros for bytes of a generation.
#[test]
fn a_file_that_was_cut_short_is_not_written() {
    let directory = tempfile::tempdir().unwrap();
    let volume = Volume::create(directory.path(), true).unwrap();
    volume.file().check_writable().unwrap();
    volume.reserve(8192).unwrap();
    volume.file().check_writable().unwrap();
    std::fs::OpenOptions::new().write(true).open(volume.file().path()).unwrap().set_len(4096).unwrap();
    let error = volume.file().check_writable().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

#[test]
fn a_store_is_its_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("volume");
    let volume = Volume::create(&directory, true).unwrap();
    volume.keep(b"a note").unwrap();
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&directory), 0o700);
    let mut files = 0;
    for entry in std::fs::read_dir(&directory).unwrap() {
        let path = entry.unwrap().path();
        assert_eq!(mode(&path), 0o600, "{}", path.display());
        files += 1;
    }
    assert_eq!(files, 4, "data, lock, note and the room for the next");
}

/// Otherwise a user who can write to the directory could have any file of the process's owner
/// overwritten.
#[test]
fn links_in_the_place_of_its_files_are_not_followed() {
    let names = [Volume::FILE_NAME, "memascend.lock", Volume::NOTE_NAME];
    for (name, direct) in names.into_iter().flat_map(|name| [(name, false), (name, true)]) {
        let root = tempfile::tempdir().unwrap();
        let (victim, directory) = (root.path().join("victim"), root.path().join("volume"));
        std::fs::write(&victim, "precious").unwrap();
        std::fs::create_dir(&directory).unwrap();
        std::os::unix::fs::symlink(&victim, directory.join(name)).unwrap();
        let error = Volume::create(&directory, direct).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ELOOP), "{name}: {error}");
        assert!(error.to_string().contains("symbolic link"), "{error}");
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    }
    // The directory itself may well be a link to where the drive is.
    let root = tempfile::tempdir().unwrap();
    std::fs::create_dir(root.path().join("drive")).unwrap();
    std::os::unix::fs::symlink(root.path().join("drive"), root.path().join("link")).unwrap();
    let volume = Volume::create(&root.path().join("link"), true).unwrap();
    // Nor is a link that waits for the note.
    let victim = root.path().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    let unfinished = root.path().join("drive").join(format!("{}.new", Volume::NOTE_NAME));
    std::os::unix::fs::symlink(&victim, unfinished).unwrap();
    volume.keep(b"a note").unwrap();
    assert_eq!(volume.read_note().unwrap(), Some(b"a note".to_vec()));
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

#[test]
fn a_missing_directory_is_named() {
    let error = Volume::create(Path::new("/nonexistent/memascend"), true).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/memascend"), "{error}");
}

#[test]
fn a_directory_in_use_is_refused_and_free_again_after() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("volume");
    let first = Volume::create(&directory, true).unwrap();
    let error = Volume::create(&directory, true).unwrap_err();
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    assert_eq!(error.errno(), Some(libc::EBUSY));
    drop(first);
    assert!(!directory.exists(), "nothing is left behind");
    Volume::create(&directory, true).unwrap();
}

#[test]
fn what_was_kept_is_opened_again_and_not_overwritten() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("volume");
    assert!(matches!(Volume::open(&directory, true).unwrap_err(), IoError::NotKept { .. }));
    let first = Volume::create(&directory, true).unwrap();
    first.reserve(8192).unwrap();
    first.keep(b"note").unwrap();
    drop(first);
    for _ in 0..2 {
        let error = Volume::create(&directory, true).unwrap_err();
        assert!(matches!(error, IoError::Kept { .. }), "{error}");
    }
    for _ in 0..2 {
        let again = Volume::open(&directory, true).unwrap();
        assert_eq!(again.read_note().unwrap().unwrap(), b"note");
        assert_eq!(std::fs::metadata(again.file().path()).unwrap().len(), 8192);
    }
    let left: Vec<_> =
        std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "data, note and the room for the next: {left:?}");
}

/// Otherwise a power failure could lose the directory's name with all that was committed in it.
#[test]
fn the_name_of_a_new_directory_is_flushed() {
    use super::folder::tests::was_flushed;
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("volume");
    Volume::create(&directory, true).unwrap().keep(b"note").unwrap();
    assert!(was_flushed(root.path()) && was_flushed(&directory));
}

#[test]
fn a_missing_directory_above_is_named_and_not_made() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("not/mounted/volume");
    let error = Volume::create(&directory, true).unwrap_err();
    let missing = root.path().join("not");
    assert!(matches!(&error, IoError::NoParent { missing: named, .. } if *named == missing), "{error}");
    assert!(error.to_string().contains("mkdir -p") && error.errno() == Some(libc::ENOENT), "{error}");
    assert!(!missing.exists());
    std::fs::create_dir(&missing).unwrap();
    let error = Volume::create(&directory, true).unwrap_err();
    assert!(error.to_string().contains("not/mounted does not exist"), "{error}");
}

/// A cleaner of temporary files may remove the lock file of a store in use.
#[test]
fn a_directory_without_its_lock_file_is_in_use_still() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("volume");
    let first = Volume::create(&directory, true).unwrap();
    first.keep(b"note").unwrap();
    std::fs::remove_file(directory.join("memascend.lock")).unwrap();
    for open in [Volume::create, Volume::open] {
        let error = open(&directory, true).unwrap_err();
        assert!(matches!(error, IoError::InUse { .. }), "{error}");
    }
    first.keep(b"another").unwrap();
    drop(first);
    assert_eq!(Volume::open(&directory, true).unwrap().read_note().unwrap().unwrap(), b"another");
}

#[test]
fn nothing_is_committed_or_removed_where_another_store_lies() {
    for moved in [true, false] {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("volume");
        let first = Volume::create(&directory, true).unwrap();
        first.keep(b"first").unwrap();
        if moved {
            std::fs::rename(&directory, root.path().join("moved")).unwrap();
        } else {
            std::fs::remove_dir_all(&directory).unwrap();
        }
        let error = first.keep(b"later").unwrap_err();
        assert!(matches!(error, IoError::Replaced { .. }), "{error}");
        let second = Volume::create(&directory, true).unwrap();
        second.keep(b"second").unwrap();
        let error = first.forget().unwrap_err();
        assert_eq!(error.errno(), Some(libc::ESTALE), "{error}");
        drop(first);
        drop(second);
        assert_eq!(Volume::open(&directory, true).unwrap().read_note().unwrap().unwrap(), b"second");
        if moved {
            let back = Volume::open(&root.path().join("moved"), true).unwrap();
            assert_eq!(back.read_note().unwrap().unwrap(), b"first");
        }
    }
}

#[test]
fn a_volume_whose_file_was_replaced_commits_nothing() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("volume");
    let volume = Volume::create(&directory, true).unwrap();
    volume.keep(b"note").unwrap();
    let file = directory.join(Volume::FILE_NAME);
    std::fs::remove_file(&file).unwrap();
    assert!(matches!(volume.keep(b"later").unwrap_err(), IoError::Replaced { .. }));
    std::fs::write(&file, "another program's").unwrap();
    assert!(matches!(volume.keep(b"later").unwrap_err(), IoError::Replaced { .. }));
    volume.leave_in_place(false);
    drop(volume);
    assert_eq!(std::fs::read(&file).unwrap(), b"another program's");
}

/// A pipe in the place of the note's files does not have a run wait for ever.
#[test]
fn pipes_in_the_place_of_its_files_are_not_waited_for() {
    use std::os::unix::ffi::OsStrExt;
    let root = tempfile::tempdir().unwrap();
    let pipe = |name: &str| {
        let path = std::ffi::CString::new(root.path().join(name).as_os_str().as_bytes()).unwrap();
        // SAFETY: a C string that lives through the call.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
    };
    pipe("memascend.json.new");
    let volume = Volume::create(root.path(), true).unwrap();
    volume.keep(b"a note").unwrap();
    assert_eq!(volume.read_note().unwrap(), Some(b"a note".to_vec()));
    drop(volume);
    std::fs::remove_file(root.path().join(Volume::NOTE_NAME)).unwrap();
    pipe(Volume::NOTE_NAME);
    let error = Volume::create(root.path(), true).unwrap_err();
    assert!(error.to_string().contains("not a regular file"), "{error}");
}
