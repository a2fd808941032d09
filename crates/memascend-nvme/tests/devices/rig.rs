//! Loop devices, and the programs that the tests run on them.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, thread};

use crc_fast::CrcAlgorithm::Crc32IsoHdlc;
use memascend_nvme::{BlockDeviceError, BlockDeviceResult, format_device};

pub(crate) const MIB: u64 = 1 << 20;

pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    crc_fast::checksum(Crc32IsoHdlc, bytes) as u32
}

/// Whether this test can run.
pub(crate) fn ready(tools: &[&str]) -> bool {
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

pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// A loop device, detached when dropped, after its mounts and swaps.
pub(crate) struct Loop {
    pub(crate) path: PathBuf,
    pub(crate) image: PathBuf,
    pub(crate) undo: Vec<Vec<String>>,
    /// None where the image belongs to another owner.
    _directory: Option<tempfile::TempDir>,
}

impl Loop {
    pub(crate) fn new(bytes: u64) -> Self {
        Self::with(bytes, &[])
    }

    pub(crate) fn with(bytes: u64, options: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        File::create(&image).unwrap().set_len(bytes).unwrap();
        let mut device = Self::of(&image, options);
        device._directory = Some(directory);
        device
    }

    pub(crate) fn of(image: &Path, options: &[&str]) -> Self {
        let image = image.to_owned();
        let path = run("losetup", &[&["-f", "--show"], options, &[image.to_str().unwrap()]].concat());
        Self { path: path.into(), image, undo: Vec::new(), _directory: None }
    }

    pub(crate) fn name(&self) -> &str {
        self.path.to_str().unwrap()
    }

    pub(crate) fn backing(&self) -> PathBuf {
        Path::new("/sys/class/block").join(self.path.file_name().unwrap()).join("loop/backing_file")
    }

    /// Runs a command, and another one before the device is detached.
    pub(crate) fn until_dropped(&mut self, command: &[&str], undo: &[&str]) {
        run(command[0], &command[1..]);
        self.undo.push(undo.iter().map(|&word| word.to_owned()).collect());
    }

    pub(crate) fn mount(&mut self, device: &str, at: &Path) {
        let at = at.to_str().unwrap();
        self.until_dropped(&["mount", "-o", "ro", device, at], &["umount", at]);
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(&self.path).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        file.sync_all().unwrap();
    }

    pub(crate) fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        File::open(&self.path).unwrap().read_exact_at(&mut read, offset).unwrap();
        read
    }

    pub(crate) fn bytes(&self) -> u64 {
        fs::metadata(&self.image).unwrap().len()
    }

    /// A checksum of every byte of it.
    pub(crate) fn checksum(&self) -> u32 {
        let mut checksum = crc_fast::Digest::new(Crc32IsoHdlc);
        for offset in (0..self.bytes()).step_by(MIB as usize) {
            checksum.update(&self.read(offset, (self.bytes() - offset).min(MIB) as usize));
        }
        checksum.finalize() as u32
    }

    /// blkid's answer, without its cache; empty if it finds nothing.
    pub(crate) fn blkid(&self) -> String {
        let output = Command::new("blkid").args(["-p", self.name()]).output().unwrap();
        assert!(matches!(output.status.code(), Some(0 | 2 | 8)), "{output:?}");
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    }

    /// The error of an operation that leaves every byte as it was.
    pub(crate) fn refused<T: std::fmt::Debug>(
        &self,
        operation: impl FnOnce() -> BlockDeviceResult<T>,
    ) -> BlockDeviceError {
        let before = self.checksum();
        let error = operation().unwrap_err();
        assert_eq!(self.checksum(), before, "bytes changed: {error}");
        assert!(error.to_string().contains(self.name()), "the message does not name the device: {error}");
        error
    }

    pub(crate) fn format(&self) -> BlockDeviceResult<memascend_nvme::Formatted> {
        format_device(&self.path, None)
    }

    pub(crate) fn destroy(&self) -> BlockDeviceResult<memascend_nvme::Formatted> {
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

/// A partition table with one partition, of the old kind.
pub(crate) fn mbr() -> [u8; 512] {
    let mut sector = [0; 512];
    sector[440..444].copy_from_slice(&[1, 2, 3, 4]);
    sector[450] = 0x83;
    sector[454..458].copy_from_slice(&2048_u32.to_le_bytes());
    sector[458..462].copy_from_slice(&16384_u32.to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}
