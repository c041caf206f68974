//! Memory reduction of processes that wait most of the time.

use std::fs;

use rustix::mm::{Advice, madvise};

/// Releases memory that the start needed and that the kernel can restore: free heap, and pages of
/// the program's code, which are read from the file again when executed.
pub fn release_memory() {
    trim();
    // Without the list, no code is released.
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let program = fs::read_link("/proc/self/exe").unwrap_or_default();
    for (start, end) in code(&maps, &program.to_string_lossy()) {
        // SAFETY: unmodified pages of an executable file mapping have the contents of the file,
        // from which the host reads them again. It refuses unmapped ranges.
        let _ = unsafe { madvise(start as *mut _, end - start, Advice::LinuxDontNeed) };
    }
}

#[cfg(target_env = "gnu")]
fn trim() {
    // SAFETY: the allocator only releases memory that it knows to be free.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(not(target_env = "gnu"))]
fn trim() {}

/// Returns the code mappings of `program` in `/proc/PID/maps` (proc(5)).
fn code<'a>(maps: &'a str, program: &'a str) -> impl Iterator<Item = (usize, usize)> + 'a {
    maps.lines().filter_map(move |line| {
        let (range, rest) = line.split_once(' ')?;
        let is_code = rest.starts_with("r-xp ") && rest.ends_with(program) && !program.is_empty();
        let (start, end) = range.split_once('-').filter(|_| is_code)?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        Some((number(start)?, number(end)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_is_left() {
        let maps = "1000-3000 r--p 00000000 fe:00 7    /bin/it\n3000-8000 r-xp 2000 fe:00 7    /bin/it\n\
                    8000-9000 r--p 7000 fe:00 7    /bin/it\na000-c000 r-xp 0 fe:00 9    /lib/libc.so.6\n";
        assert_eq!(code(maps, "/bin/it").collect::<Vec<_>>(), [(0x3000, 0x8000)]);
        assert_eq!(code(maps, "").count(), 0);
    }

    #[test]
    fn the_program_continues() {
        let kept = vec![7_u8; 1 << 20];
        release_memory();
        assert!(kept.iter().all(|&byte| byte == 7));
    }
}
