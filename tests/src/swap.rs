//! Swap in the guest's memory (zram), so that pages can be paged out.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};

const DEVICE: &str = "/dev/zram0";

/// Swap space, turned off when this is dropped.
pub struct Swap(CString);

impl Swap {
    /// Turns on so many bytes of it. `None`, said, where there is no zram device.
    ///
    /// # Panics
    ///
    /// If the device is there and does not serve.
    pub fn on(bytes: usize) -> Option<Swap> {
        if std::env::var_os("RDMALLOC_GUEST").is_none() || fs::metadata(DEVICE).is_err() {
            println!("skipped: no zram device (in a guest, and its kernel's module)");
            return None;
        }
        fs::write("/sys/block/zram0/disksize", bytes.to_string()).expect("a size");
        // The header that mkswap writes (`union swap_header` in linux/swap.h): version and last page, and a mark at the page's end.
        let page = 4096;
        let mut header = vec![0_u8; page];
        header[1024..1028].copy_from_slice(&1_u32.to_ne_bytes());
        header[1028..1032].copy_from_slice(&((bytes / page - 1) as u32).to_ne_bytes());
        header[page - 10..].copy_from_slice(b"SWAPSPACE2");
        let mut device = File::options().write(true).open(DEVICE).expect("it opens");
        device.seek(SeekFrom::Start(0)).and_then(|_| device.write_all(&header)).expect("a header");
        device.sync_all().expect("written");
        let swap = Swap(CString::new(DEVICE).expect("no zero"));
        // SAFETY: the path ends in a zero.
        let result = unsafe { libc::swapon(swap.0.as_ptr(), 0) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        Some(swap)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // SAFETY: the path ends in a zero.
        unsafe { libc::swapoff(self.0.as_ptr()) };
        let _ = fs::write("/sys/block/zram0/reset", "1");
    }
}
