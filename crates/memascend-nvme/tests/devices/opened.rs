//! Formatted devices: found, opened, and refused where they are damaged or belong to another store.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::{env, slice};

use memascend_nvme::{BlockDeviceError, Content, Device, find_device, format_device, random_uuid};

use crate::rig::{Loop, MIB, crc32, mbr, ready, run};

#[test]
fn another_store_is_refused() {
    if !ready(&[]) {
        return;
    }
    let device = Loop::new(32 * MIB);
    let first = device.format().unwrap();
    assert!(first.destroyed.is_empty());
    let error = device.refused(|| device.format());
    assert!(error.to_string().contains(&format!("UUID {}) that is not kept", first.id)), "{error}");

    Device::open(&device.path).unwrap().write_note(b"manifest").unwrap();
    let error = device.refused(|| device.format());
    assert!(matches!(error, BlockDeviceError::BelongsToStore { .. }), "{error}");
    assert!(
        error.to_string().contains("a kept memascend store") && error.to_string().contains("8 bytes"),
        "{error}"
    );
    let other = Loop::new(32 * MIB);
    let error = device.refused(|| format_device(&device.path, Some(&other.path)));
    assert!(matches!(error, BlockDeviceError::OtherDevice { .. }), "{error}");

    // By another name of the same device.
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&device.path, &link).unwrap();
    let second = format_device(&device.path, Some(&link)).unwrap();
    assert_ne!(first.id, second.id);
    assert_eq!(second.destroyed, [Content::Store { id: first.id, note_bytes: Some(8) }]);
    assert_eq!(Device::open(&device.path).unwrap().read_note().unwrap(), None);
    assert!(matches!(find_device(first.id).unwrap_err(), BlockDeviceError::NotFound { .. }));
}

/// Memory that O_DIRECT can use.
#[repr(C, align(4096))]
struct Block([u8; 4096]);

#[test]
fn both_sector_sizes_work() {
    if !ready(&[]) {
        return;
    }
    for (sector, odd_bytes) in [(512, 0), (512, 512), (4096, 0)] {
        let device = Loop::with(40 * MIB + odd_bytes, &["-b", &sector.to_string(), "--direct-io=on"]);
        let formatted = device.format().unwrap();
        let opened = Device::open(&device.path).unwrap();
        assert_eq!(opened.logical_block_bytes(), sector);
        assert_eq!((opened.id(), opened.path()), (formatted.id, device.path.as_path()));
        assert_eq!((opened.data_offset(), opened.data_bytes()), (2 * MIB, 37 * MIB));
        assert_eq!(formatted.data_bytes, opened.data_bytes());
        assert_eq!(opened.notice(), None);
        // SAFETY: a plain system call on a descriptor that lives.
        let flags = unsafe { libc::fcntl(opened.file().as_raw_fd(), libc::F_GETFL) };
        // O_NONBLOCK would make io_uring give requests up instead of waiting.
        assert_eq!(flags & (libc::O_DIRECT | libc::O_NONBLOCK), libc::O_DIRECT);
        let block = Block([9; 4096]);
        for offset in [opened.data_offset(), opened.data_offset() + opened.data_bytes() - 4096] {
            opened.file().write_all_at(&block.0, offset).unwrap();
        }

        let note = vec![5; 10_001];
        opened.write_note(&note).unwrap();
        let error = opened.write_note(&vec![0; opened.note_limit_bytes() as usize + 1]).unwrap_err();
        assert!(matches!(error, BlockDeviceError::NoteTooLong { .. }), "{error}");
        drop(opened);
        let opened = Device::open(&device.path).unwrap();
        assert_eq!(opened.read_note().unwrap(), Some(note));
        opened.clear_note().unwrap();
        assert_eq!(opened.read_note().unwrap(), None);
        let mut read = Block([0; 4096]);
        opened
            .file()
            .read_exact_at(slice::from_mut(&mut read)[0].0.as_mut_slice(), opened.data_offset())
            .unwrap();
        assert_eq!(read.0, block.0);
    }
}

#[test]
fn a_renamed_device_is_found_by_its_uuid() {
    if !ready(&[]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    File::create(&image).unwrap().set_len(32 * MIB).unwrap();
    let device = Loop::of(&image, &[]);
    let id = device.format().unwrap().id;
    let text = format!("UUID={id}");
    assert_eq!(Device::open(&text).unwrap().path(), device.path);
    let old = device.path.clone();
    drop(device);
    let error = Device::open(&text).unwrap_err();
    assert!(
        matches!(error, BlockDeviceError::NotFound { .. }) && error.to_string().contains(&id.to_string()),
        "{error}"
    );

    let mut others = Vec::new();
    let renamed = loop {
        let device = Loop::of(&image, &[]);
        if device.path != old {
            break device;
        }
        drop(device);
        others.push(Loop::new(MIB));
    };
    let opened = Device::open(&text).unwrap();
    assert_eq!((opened.path(), opened.id()), (renamed.path.as_path(), id));
    assert!(matches!(Device::open("UUID=17").unwrap_err(), BlockDeviceError::NotUuid { .. }));
}

#[test]
fn a_clone_is_not_taken_for_its_original() {
    if !ready(&[]) {
        return;
    }
    let device = Loop::new(16 * MIB);
    let id = device.format().unwrap().id;
    let clone = Loop::new(16 * MIB);
    clone.write(0, &device.read(0, device.bytes() as usize));
    let error = Device::open(format!("UUID={id}")).unwrap_err();
    assert!(matches!(error, BlockDeviceError::Clone { .. }), "{error}");
    assert!(error.to_string().contains(device.name()) && error.to_string().contains(clone.name()), "{error}");
    assert_eq!(Device::open(&device.path).unwrap().id(), id);
    drop(device);
    assert_eq!(find_device(id).unwrap(), clone.path);
}

#[test]
fn a_lost_first_block_is_restored_as_the_message_says() {
    if !ready(&["dd"]) {
        return;
    }
    let device = Loop::new(16 * MIB + 512);
    let id = device.format().unwrap().id;
    Device::open(&device.path).unwrap().write_note(b"manifest").unwrap();
    device.write(0, &mbr());
    device.write(512, &[0; 4096 - 512]);
    for path in [device.name().to_owned(), format!("UUID={id}")] {
        let error = device.refused(|| Device::open(&path));
        let message = error.to_string();
        assert!(matches!(error, BlockDeviceError::FirstBlockLost { .. }), "{message}");
        assert!(message.contains("the copy") && message.contains("a partition table (dos"), "{message}");
        let error = device.refused(|| device.format());
        assert!(error.to_string().contains(&id.to_string()), "{error}");
        let command = message.split('`').nth(1).unwrap().to_owned();
        if path.starts_with("UUID") {
            run("sh", &["-c", &command]);
        }
    }
    let opened = Device::open(&device.path).unwrap();
    assert_eq!((opened.id(), opened.read_note().unwrap()), (id, Some(b"manifest".to_vec())));
}

#[test]
fn a_damaged_or_newer_superblock_is_refused() {
    if !ready(&[]) {
        return;
    }
    let device = Loop::new(16 * MIB);
    device.format().unwrap();
    let whole = device.read(0, 4096);
    let mut damaged = whole.clone();
    damaged[100] ^= 1;
    for offset in [0, 16 * MIB - 4096] {
        device.write(offset, &damaged);
    }
    let error = device.refused(|| Device::open(&device.path));
    assert!(matches!(error, BlockDeviceError::Damaged { .. }), "{error}");
    let error = device.refused(|| device.format());
    assert!(error.to_string().contains("a damaged memascend superblock"), "{error}");

    let mut newer = whole;
    newer[16] = 9;
    let crc = crc32(&newer[..4092]);
    newer[4092..].copy_from_slice(&crc.to_le_bytes());
    device.write(0, &newer);
    let error = device.refused(|| Device::open(&device.path));
    assert!(matches!(error, BlockDeviceError::NewerVersion { version: 9, supported: 1, .. }), "{error}");
    let error = device.refused(|| device.format());
    assert!(error.to_string().contains("format version 9"), "{error}");
    assert_eq!(device.destroy().unwrap().destroyed, [Content::NewerStore { version: 9 }]);
}

#[test]
fn a_device_that_changed_its_size_is_told_of() {
    if !ready(&[]) {
        return;
    }
    let device = Loop::new(32 * MIB);
    let id = device.format().unwrap().id;
    let resize = |bytes| {
        OpenOptions::new().write(true).open(&device.image).unwrap().set_len(bytes).unwrap();
        run("losetup", &["-c", device.name()]);
    };
    resize(40 * MIB);
    let opened = Device::open(&device.path).unwrap();
    assert_eq!((opened.id(), opened.data_bytes()), (id, 29 * MIB));
    assert!(opened.notice().unwrap().contains("has grown"), "{:?}", opened.notice());
    drop(opened);
    resize(24 * MIB);
    let error = device.refused(|| Device::open(&device.path));
    assert!(matches!(error, BlockDeviceError::Shrunk { .. }), "{error}");
    assert!(matches!(device.refused(|| device.format()), BlockDeviceError::BelongsToStore { .. }));
}

#[test]
fn a_signature_beside_the_superblock_is_noticed() {
    if !ready(&[]) {
        return;
    }
    let device = Loop::new(128 * MIB);
    device.format().unwrap();
    let mut raid = [0; 256];
    raid[..4].copy_from_slice(&0xa92b_4efc_u32.to_le_bytes());
    raid[4] = 1;
    raid[16..32].fill(7);
    raid[144] = 8;
    device.write(4096, &raid);
    let error = device.refused(|| Device::open(&device.path));
    assert!(matches!(error, BlockDeviceError::Overwritten { .. }), "{error}");
    assert!(error.to_string().contains("linux_raid_member"), "{error}");
}

#[test]
fn without_libblkid_only_a_named_device_is_formatted() {
    const CHILD: &str = "MEMASCEND_TEST_DEVICE";
    if let Some(path) = env::var_os(CHILD) {
        let path = PathBuf::from(path);
        let before = fs::read(&path).unwrap();
        let error = format_device(&path, None).unwrap_err();
        assert!(fs::read(&path).unwrap() == before, "bytes changed");
        assert!(matches!(error, BlockDeviceError::NoLibblkid { .. }), "{error}");
        assert!(
            error.to_string().contains("libblkid1") && error.to_string().contains("no-such-library"),
            "{error}"
        );
        let destroyed = format_device(&path, Some(&path)).unwrap().destroyed;
        assert!(matches!(&destroyed[..], [Content::Unknown(_)]), "{destroyed:?}");
        return;
    }
    if !ready(&["mkswap"]) {
        return;
    }
    // The library is chosen by the environment, and that is the whole process's.
    let child = |device: &Loop, variable: &str| {
        let status = Command::new(env::current_exe().unwrap())
            .args(["--exact", "opened::without_libblkid_only_a_named_device_is_formatted", "--nocapture"])
            .env(CHILD, &device.path)
            .env("MEMASCEND_LIBBLKID", variable)
            .output()
            .unwrap();
        (status.status.success(), String::from_utf8_lossy(&status.stderr).into_owned())
    };
    let device = Loop::new(16 * MIB);
    run("mkswap", &[device.name()]);
    // With the library the check fails, so it is the library that is missed.
    let (passed, errors) = child(&device, "libblkid.so.1");
    assert!(!passed && errors.contains("swap space"), "{errors}");
    assert!(device.blkid().contains("swap"));
    let (passed, errors) = child(&device, "no-such-library.so");
    assert!(passed, "{errors}");
    assert_eq!(device.blkid(), "");
    Device::open(&device.path).unwrap();
}

#[test]
fn an_unknown_uuid_is_not_found() {
    let id = random_uuid().unwrap();
    let error = find_device(id).unwrap_err();
    assert!(matches!(error, BlockDeviceError::NotFound { .. }), "{error}");
    assert!(error.to_string().contains(&id.to_string()), "{error}");
}
