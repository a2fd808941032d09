//! Devices that are not formatted: they hold data, or are in use. Those with data are, when told to destroy it.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;

use memascend_nvme::{BlockDeviceError, Content, Device, find_device, format_device};

use crate::rig::{Loop, MIB, crc32, mbr, ready, run};

/// Refused by name, refused with another device to destroy, destroyed when told so, and nothing is
/// left.
fn is_refused_and_destroyed(device: &Loop, kind: &str, words: &[&str]) {
    let error = device.refused(|| device.format());
    let BlockDeviceError::NotEmpty { found, .. } = &error else { panic!("{error}") };
    assert!(found.iter().any(|signature| signature.kind == kind), "{error}");
    for word in words {
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
    let error = device.refused(|| Device::open(&device.path));
    assert!(
        matches!(error, BlockDeviceError::Unformatted { .. }) && error.to_string().contains(kind),
        "{error}"
    );

    let other = Loop::new(16 * MIB);
    let before = other.checksum();
    let error = device.refused(|| format_device(&device.path, Some(&other.path)));
    assert!(matches!(error, BlockDeviceError::OtherDevice { .. }), "{error}");
    assert_eq!(other.checksum(), before);

    let formatted = device.destroy().unwrap();
    let is_it =
        |content: &Content| matches!(content, Content::Signature(signature) if signature.kind == kind);
    assert!(formatted.destroyed.iter().any(is_it), "{formatted:?}");
    assert_eq!(device.blkid(), "");
    assert_eq!(Device::open(&device.path).unwrap().id(), formatted.id);
}

#[test]
fn filesystems_and_swap_are_refused() {
    if !ready(&["mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "mkswap"]) {
        return;
    }
    let cases = [
        ("ext4", 32, &["mkfs.ext4", "-q", "-L", "mine"][..]),
        ("xfs", 320, &["mkfs.xfs", "-q", "-L", "mine"]),
        ("btrfs", 128, &["mkfs.btrfs", "-q", "-L", "mine"]),
        ("swap", 32, &["mkswap", "-L", "mine"]),
    ];
    for (kind, size_mib, command) in cases {
        let device = Loop::new(size_mib * MIB);
        run(command[0], &[&command[1..], &[device.name()]].concat());
        is_refused_and_destroyed(&device, kind, &["label \"mine\"", "UUID ", "--destroy"]);
    }
}

#[test]
fn raid_lvm_and_encrypted_volumes_are_refused() {
    if !ready(&[]) {
        return;
    }
    let mut raid = [0; 256];
    raid[..4].copy_from_slice(&0xa92b_4efc_u32.to_le_bytes());
    raid[4] = 1;
    raid[16..32].fill(7);
    raid[144] = 8;
    let mut lvm = [0; 512];
    lvm[..8].copy_from_slice(b"LABELONE");
    lvm[8] = 1;
    lvm[20] = 32;
    lvm[24..32].copy_from_slice(b"LVM2 001");
    lvm[32..64].fill(b'a');
    let mut luks = [0; 592];
    luks[..8].copy_from_slice(b"LUKS\xba\xbe\0\x01");
    luks[168..204].copy_from_slice(b"01234567-89ab-4cde-8f01-23456789abcd");
    // Farther from the end of the device than the area that is overwritten unread.
    let fake_raid = b"Promise Technology, Inc.";
    let size = 32 * MIB;
    let cases = [
        ("linux_raid_member", 4096, &raid[..]),
        ("LVM2_member", 512, &lvm),
        ("crypto_LUKS", 0, &luks),
        ("promise_fasttrack_raid_member", size - 3087 * 512, fake_raid),
    ];
    for (kind, offset, bytes) in cases {
        let device = Loop::new(size);
        device.write(offset, bytes);
        is_refused_and_destroyed(&device, kind, &[]);
    }
}

#[test]
fn signatures_that_contradict_each_other_are_all_named() {
    if !ready(&["mkfs.ext4", "mkfs.btrfs", "wipefs"]) {
        return;
    }
    let device = Loop::new(128 * MIB);
    run("mkfs.btrfs", &["-q", device.name()]);
    let btrfs = device.read(65536, 4096);
    run("wipefs", &["-q", "--all", device.name()]);
    run("mkfs.ext4", &["-q", device.name()]);
    device.write(65536, &btrfs);
    assert!(device.blkid().contains("ambivalent"), "{}", device.blkid());
    is_refused_and_destroyed(&device, "ext4", &["(ext4", "(btrfs"]);
}

/// Data without a signature is refused with its place, and destroyed when told so.
#[track_caller]
fn is_unknown_and_destroyed(device: &Loop, words: &[&str]) {
    let error = device.refused(|| device.format());
    assert!(matches!(error, BlockDeviceError::NotBlank { .. }), "{error}");
    for &word in words.iter().chain(&["--destroy"]) {
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
    let error = device.refused(|| Device::open(&device.path));
    assert!(matches!(error, BlockDeviceError::Unformatted { .. }), "{error}");
    assert!(error.to_string().contains(words[0]), "{error}");
    let formatted = device.destroy().unwrap();
    assert!(matches!(&formatted.destroyed[..], [Content::Unknown(_)]), "{formatted:?}");
    assert_eq!(Device::open(&device.path).unwrap().id(), formatted.id);
}

#[test]
fn data_without_a_signature_is_refused_wherever_it_lies() {
    if !ready(&[]) {
        return;
    }
    // As xorshift makes them: encrypted data has no signature.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let random: Vec<u8> = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    })
    .take(4096)
    .collect();
    let size = 32 * MIB;
    let cases: [(u64, &[u8], &str); 7] = [
        (0, b"precious raw data", "text at byte 0 (\"precious raw data"),
        (0, &random, "random or encrypted bytes at byte 0 ("),
        (MIB, b"\x01\x02", "bytes at byte 1048576 (01 02"),
        // One byte, in the midst of a block in the midst of the device.
        (size / 2 + 1234, b"\x80", "bytes at byte 16778450 (80"),
        (size - MIB - 1, b"end", "text at byte 32505855"),
        (size - 1, b"\x07", "bytes at byte 33554431 (07)"),
        (size - 4096, &random, "random or encrypted bytes at byte 33550336"),
    ];
    for (offset, bytes, words) in cases {
        let device = Loop::new(size);
        device.write(offset, bytes);
        is_unknown_and_destroyed(&device, &[words, "of 8192 blocks"]);
    }
    // A device too large to be read completely, with a run of data between the places always read.
    let device = Loop::new(512 * MIB);
    device.write(300 * MIB, &random.repeat(64));
    is_unknown_and_destroyed(&device, &["random or encrypted bytes at byte 31", "of 40960 blocks"]);
}

#[test]
fn what_drives_return_for_discarded_blocks_is_blank() {
    if !ready(&[]) {
        return;
    }
    let device = Loop::new(32 * MIB);
    for offset in (0..32 * MIB).step_by(2 * MIB as usize) {
        device.write(offset, &vec![0xff; MIB as usize]);
    }
    assert!(device.format().unwrap().destroyed.is_empty());
}

/// Header and entries of an empty GPT at `sector`, with its other copy at `other`.
fn gpt(sector: u64, other: u64, entries_at: u64, sectors: u64) -> (Vec<u8>, Vec<u8>) {
    let entries = vec![0; 128 * 128];
    let mut header = vec![0; 512];
    header[..16].copy_from_slice(b"EFI PART\0\0\x01\0\x5c\0\0\0");
    for (at, number) in [(24, sector), (32, other), (40, 34), (48, sectors - 34), (72, entries_at)] {
        header[at..at + 8].copy_from_slice(&number.to_le_bytes());
    }
    header[56..72].fill(0x42);
    header[80] = 128;
    header[84] = 128;
    header[88..92].copy_from_slice(&crc32(&entries).to_le_bytes());
    let crc = crc32(&header[..92]);
    header[16..20].copy_from_slice(&crc.to_le_bytes());
    (header, entries)
}

#[test]
fn partition_tables_are_refused() {
    if !ready(&[]) {
        return;
    }
    let device = Loop::new(32 * MIB);
    device.write(0, &mbr());
    is_refused_and_destroyed(&device, "dos", &["a partition table"]);

    // With its own MBR, and with nothing but the second header at the end of the device.
    for whole in [true, false] {
        let device = Loop::new(32 * MIB);
        let sectors = 32 * MIB / 512;
        let (header, entries) = gpt(sectors - 1, 1, sectors - 33, sectors);
        device.write((sectors - 33) * 512, &entries);
        device.write((sectors - 1) * 512, &header);
        if whole {
            let (header, entries) = gpt(1, sectors - 1, 2, sectors);
            let mut protective = mbr();
            protective[450] = 0xee;
            protective[454..462].copy_from_slice(&[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]);
            device.write(0, &protective);
            device.write(512, &header);
            device.write(1024, &entries);
        }
        is_refused_and_destroyed(&device, "gpt", &["a partition table"]);
    }
}

#[test]
fn partitions_are_refused_and_forgotten_when_destroyed() {
    if !ready(&["addpart", "mkfs.ext4", "mount"]) {
        return;
    }
    let mut device = Loop::with(64 * MIB, &["-P"]);
    device.write(0, &mbr());
    let partition = format!("{}p1", device.name());
    // Where the kernel knows the table, it is there by now.
    if !Path::new(&partition).exists() {
        run("addpart", &[device.name(), "1", "2048", "65536"]);
    }
    let error = device.refused(|| device.format());
    assert!(
        matches!(error, BlockDeviceError::Partitioned { .. }) && error.to_string().contains(&partition),
        "{error}"
    );

    run("mkfs.ext4", &["-q", &partition]);
    let directory = tempfile::tempdir().unwrap();
    device.mount(&partition, directory.path());
    for operation in [Loop::format, Loop::destroy] {
        let error = device.refused(|| operation(&device));
        let BlockDeviceError::Mounted { device: mounted, mount_point, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!((mounted.as_path(), mount_point.as_path()), (Path::new(&partition), directory.path()));
    }
    run("umount", &[directory.path().to_str().unwrap()]);
    device.undo.clear();

    // Open, though not claimed.
    let reader = File::open(&partition).unwrap();
    let error = device.refused(|| device.destroy());
    assert!(matches!(error, BlockDeviceError::Busy { .. }), "{error}");
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    drop(reader);

    let formatted = device.destroy().unwrap();
    assert!(
        matches!(&formatted.destroyed[0], Content::Partitions(names) if names[0] == partition),
        "{formatted:?}"
    );
    assert!(!Path::new(&partition).exists());
    Device::open(&device.path).unwrap();
}

#[test]
fn a_partition_can_be_formatted_and_its_disk_is_not_mistaken_for_it() {
    if !ready(&["addpart"]) {
        return;
    }
    let device = Loop::with(64 * MIB, &["-P"]);
    // Its last block is the disk's last block.
    run("addpart", &[device.name(), "1", "2048", &(63 * MIB / 512).to_string()]);
    let partition = PathBuf::from(format!("{}p1", device.name()));
    let formatted = format_device(&partition, None).unwrap();
    assert_eq!(find_device(formatted.id).unwrap(), partition);
    let error = Device::open(&device.path).unwrap_err();
    assert!(matches!(error, BlockDeviceError::Unformatted { .. }), "{error}");
    let opened = Device::open(&partition).unwrap();
    let error = device.refused(|| device.destroy());
    assert!(matches!(error, BlockDeviceError::Busy { .. }), "{error}");
    drop(opened);
}

#[test]
fn mounted_filesystems_are_refused_in_any_case() {
    if !ready(&["mkfs.ext4", "mkfs.btrfs", "mount"]) {
        return;
    }
    for (tool, size_mib) in [("mkfs.ext4", 32), ("mkfs.btrfs", 128)] {
        let mut device = Loop::new(size_mib * MIB);
        run(tool, &["-q", device.name()]);
        let directory = tempfile::Builder::new().prefix("with blank ").tempdir().unwrap();
        let name = device.name().to_owned();
        device.mount(&name, directory.path());
        for operation in [Loop::format, Loop::destroy] {
            let error = device.refused(|| operation(&device));
            assert!(
                matches!(&error, BlockDeviceError::Mounted { mount_point, .. } if mount_point == directory.path()),
                "{error}"
            );
            assert_eq!(error.errno(), Some(libc::EBUSY));
        }
        let error = device.refused(|| Device::open(&device.path));
        assert!(matches!(error, BlockDeviceError::Mounted { .. }), "{error}");
        drop(device);
    }
}

#[test]
fn swap_in_use_is_refused_in_any_case() {
    if !ready(&["mkswap", "swapon"]) {
        return;
    }
    let mut device = Loop::new(32 * MIB);
    run("mkswap", &[device.name()]);
    let name = device.name().to_owned();
    device.until_dropped(&["swapon", "-p", "0", &name], &["swapoff", &name]);
    // The kernel may swap: bytes are not compared.
    for operation in [Loop::format, Loop::destroy] {
        let error = operation(&device).unwrap_err();
        assert!(
            matches!(error, BlockDeviceError::Swap { .. }) && error.to_string().contains("swapoff"),
            "{error}"
        );
    }
    assert!(device.blkid().contains("swap"));
}

#[test]
fn a_device_under_another_is_refused_in_any_case() {
    if !ready(&[]) {
        return;
    }
    let device = Loop::new(32 * MIB);
    let above = Loop::of(&device.path, &[]);
    for operation in [Loop::format, Loop::destroy] {
        let error = device.refused(|| operation(&device));
        assert!(
            matches!(error, BlockDeviceError::Held { .. }) && error.to_string().contains(above.name()),
            "{error}"
        );
    }
    drop(above);
    device.format().unwrap();
}

#[test]
fn a_device_that_somebody_claimed_is_refused_in_any_case() {
    if !ready(&[]) {
        return;
    }
    let device = Loop::new(32 * MIB);
    let own_name = format!("process {} (", std::process::id());
    let exclusive = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&device.path).unwrap();
    for operation in [Loop::format, Loop::destroy] {
        let error = device.refused(|| operation(&device));
        assert!(
            matches!(error, BlockDeviceError::Busy { .. }) && error.to_string().contains(&own_name),
            "{error}"
        );
    }
    drop(exclusive);

    let locked = File::open(&device.path).unwrap();
    // SAFETY: a plain system call on a descriptor that lives.
    assert_eq!(unsafe { libc::flock(locked.as_raw_fd(), libc::LOCK_SH) }, 0);
    let error = device.refused(|| device.destroy());
    assert!(
        matches!(error, BlockDeviceError::Busy { .. }) && error.to_string().contains(&own_name),
        "{error}"
    );
    drop(locked);
    device.format().unwrap();
}

#[test]
fn a_device_opens_once() {
    if !ready(&[]) {
        return;
    }
    let device = Loop::new(32 * MIB);
    device.format().unwrap();
    let first = Device::open(&device.path).unwrap();
    for operation in [Loop::format, Loop::destroy] {
        assert!(matches!(device.refused(|| operation(&device)), BlockDeviceError::Busy { .. }));
    }
    let error = device.refused(|| Device::open(&device.path));
    assert!(matches!(error, BlockDeviceError::Busy { .. }), "{error}");
    assert_eq!(error.errno(), Some(libc::EBUSY));
    drop(first);
    Device::open(&device.path).unwrap();
}

#[test]
fn what_cannot_be_a_device_is_refused() {
    if !ready(&[]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, vec![0; 16 << 20]).unwrap();
    for path in [directory.path(), &file, Path::new("/dev/null")] {
        for destroy in [None, Some(path)] {
            let error = format_device(path, destroy).unwrap_err();
            assert!(matches!(error, BlockDeviceError::NotBlockDevice { .. }), "{error}");
        }
    }
    assert_eq!(fs::read(&file).unwrap(), vec![0; 16 << 20]);
    let error = format_device(&directory.path().join("missing"), None).unwrap_err();
    assert!(matches!(error, BlockDeviceError::Missing { .. }), "{error}");

    let small = Loop::new(16 * MIB - 4096);
    for operation in [Loop::format, Loop::destroy] {
        assert!(matches!(small.refused(|| operation(&small)), BlockDeviceError::TooSmall { .. }));
    }
    let read_only = Loop::with(16 * MIB, &["-r"]);
    for operation in [Loop::format, Loop::destroy] {
        let error = read_only.refused(|| operation(&read_only));
        assert!(matches!(error, BlockDeviceError::ReadOnly { .. }), "{error}");
    }
}

#[test]
fn a_user_without_permission_is_told_so() {
    if !ready(&[]) {
        return;
    }
    let device = Loop::new(16 * MIB);
    let formatted = device.format().unwrap();
    let path = device.path.clone();
    // The user of a thread for files is its own, and goes with the thread.
    let errors = thread::spawn(move || {
        // SAFETY: plain system calls on numbers.
        unsafe {
            libc::setfsgid(65534);
            libc::setfsuid(65534);
        }
        [
            format_device(&path, None).unwrap_err(),
            Device::open(&path).unwrap_err(),
            find_device(formatted.id).unwrap_err(),
        ]
    })
    .join()
    .unwrap();
    assert!(matches!(errors[0], BlockDeviceError::Permission { .. }), "{}", errors[0]);
    assert!(matches!(errors[1], BlockDeviceError::Permission { .. }), "{}", errors[1]);
    assert!(
        matches!(&errors[2], BlockDeviceError::NotFound { denied, .. } if denied.contains(&device.path)),
        "{}",
        errors[2]
    );
}
