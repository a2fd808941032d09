//! Raw devices, for real: on loop devices, with real filesystems. They need root, and the tools that make the
//! filesystems to refuse. Without them the tests are skipped with a notice, or fail if MEMASCEND_REQUIRE
//! names `root` (`mkfs` for its tools) or is `all`.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, slice, thread};

use crc_fast::CrcAlgorithm::Crc32IsoHdlc;
use memascend_nvme::{
    BlockDeviceError, BlockDeviceResult, Content, Device, find_device, format_device, random_uuid,
};

const MIB: u64 = 1 << 20;

fn crc32(bytes: &[u8]) -> u32 {
    crc_fast::checksum(Crc32IsoHdlc, bytes) as u32
}

/// Whether this test can run.
fn ready(tools: &[&str]) -> bool {
    // Root alone is not enough: in a container it may attach and mount nothing.
    const CAP_SYS_ADMIN: u32 = 21;
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    let capabilities = u64::from_str_radix(capabilities.trim(), 16).unwrap();
    let is_root = capabilities >> CAP_SYS_ADMIN & 1 == 1 && Path::new("/dev/loop-control").exists();
    let missing = ["losetup", "blkid"].iter().chain(tools).find(|tool| {
        !env::split_paths("/usr/sbin:/sbin:/usr/bin:/bin").any(|directory| directory.join(tool).exists())
    });
    let reason = match missing {
        None if is_root => return true,
        None => "it needs root, and loop devices".to_owned(),
        Some(tool) => format!("it needs {tool}"),
    };
    let need = if missing.is_some_and(|tool| tool.starts_with("mkfs.")) { "mkfs" } else { "root" };
    let required = env::var("MEMASCEND_REQUIRE").unwrap_or_default();
    let is_required = required.split(',').map(str::trim).any(|name| name == need || name == "all");
    assert!(!is_required, "cannot run: {reason} (MEMASCEND_REQUIRE={required})");
    println!("left out: {reason}");
    false
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A loop device, detached when dropped, after its mounts and swaps.
struct Loop {
    path: PathBuf,
    image: PathBuf,
    undo: Vec<Vec<String>>,
    /// None where the image belongs to another owner.
    _directory: Option<tempfile::TempDir>,
}

impl Loop {
    fn new(bytes: u64) -> Self {
        Self::with(bytes, &[])
    }

    fn with(bytes: u64, options: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        File::create(&image).unwrap().set_len(bytes).unwrap();
        let mut device = Self::of(&image, options);
        device._directory = Some(directory);
        device
    }

    fn of(image: &Path, options: &[&str]) -> Self {
        let image = image.to_owned();
        let path = run("losetup", &[&["-f", "--show"], options, &[image.to_str().unwrap()]].concat());
        Self { path: path.into(), image, undo: Vec::new(), _directory: None }
    }

    fn name(&self) -> &str {
        self.path.to_str().unwrap()
    }

    fn backing(&self) -> PathBuf {
        Path::new("/sys/class/block").join(self.path.file_name().unwrap()).join("loop/backing_file")
    }

    /// Runs a command, and another one before the device is detached.
    fn until_dropped(&mut self, command: &[&str], undo: &[&str]) {
        run(command[0], &command[1..]);
        self.undo.push(undo.iter().map(|&word| word.to_owned()).collect());
    }

    fn mount(&mut self, device: &str, at: &Path) {
        let at = at.to_str().unwrap();
        self.until_dropped(&["mount", "-o", "ro", device, at], &["umount", at]);
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(&self.path).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        file.sync_all().unwrap();
    }

    fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        File::open(&self.path).unwrap().read_exact_at(&mut read, offset).unwrap();
        read
    }

    fn bytes(&self) -> u64 {
        fs::metadata(&self.image).unwrap().len()
    }

    /// A checksum of every byte of it.
    fn checksum(&self) -> u32 {
        let mut checksum = crc_fast::Digest::new(Crc32IsoHdlc);
        for offset in (0..self.bytes()).step_by(MIB as usize) {
            checksum.update(&self.read(offset, (self.bytes() - offset).min(MIB) as usize));
        }
        checksum.finalize() as u32
    }

    /// blkid's answer, without its cache; empty if it finds nothing.
    fn blkid(&self) -> String {
        let output = Command::new("blkid").args(["-p", self.name()]).output().unwrap();
        assert!(matches!(output.status.code(), Some(0 | 2 | 8)), "{output:?}");
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    }

    /// The error of an operation that leaves every byte as it was.
    fn refused<T: std::fmt::Debug>(
        &self,
        operation: impl FnOnce() -> BlockDeviceResult<T>,
    ) -> BlockDeviceError {
        let before = self.checksum();
        let error = operation().unwrap_err();
        assert_eq!(self.checksum(), before, "bytes changed: {error}");
        assert!(error.to_string().contains(self.name()), "the message does not name the device: {error}");
        error
    }

    fn format(&self) -> BlockDeviceResult<memascend_nvme::Formatted> {
        format_device(&self.path, None)
    }

    fn destroy(&self) -> BlockDeviceResult<memascend_nvme::Formatted> {
        format_device(&self.path, Some(&self.path))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        for command in self.undo.iter().rev() {
            let _ = Command::new(&command[0]).args(&command[1..]).status();
        }
        let backing = fs::read(self.backing()).unwrap_or_default();
        let _ = Command::new("losetup").args(["-d", self.name()]).status();
        // While another test looks at the device, it goes away only afterwards.
        let start = Instant::now();
        while fs::read(self.backing()).is_ok_and(|now| now == backing)
            && start.elapsed() < Duration::from_secs(10)
        {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

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

/// A partition table with one partition, of the old kind.
fn mbr() -> [u8; 512] {
    let mut sector = [0; 512];
    sector[440..444].copy_from_slice(&[1, 2, 3, 4]);
    sector[450] = 0x83;
    sector[454..458].copy_from_slice(&2048_u32.to_le_bytes());
    sector[458..462].copy_from_slice(&16384_u32.to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
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
            .args(["--exact", "without_libblkid_only_a_named_device_is_formatted", "--nocapture"])
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
