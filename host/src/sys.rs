//! System calls of the host.
//!
//! `linux-raw-sys` provides numbers and structures; this module has the few calls that are made
//! without a C library. Errors are Linux's numbers; messages display their names.

use core::arch::asm;

use linux_raw_sys::general as linux;
use linux_raw_sys::prctl;

pub use proto::errno::Errno;

type Result<T> = core::result::Result<T, Errno>;

/// Makes a system call with up to six arguments.
///
/// # Safety
/// Its effect on memory must be permitted: it must not unmap or change memory of Rust objects.
#[inline(always)]
pub unsafe fn call(number: u32, arguments: [u64; 6]) -> Result<u64> {
    let [a, b, c, d, e, f] = arguments;
    let result: u64;
    // SAFETY: the registers are those of Linux's calling convention (syscall(2)); the caller
    // guarantees the effect.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") u64::from(number) => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") c,
            in("r10") d,
            in("r8") e,
            in("r9") f,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!(
            "svc 0",
            in("x8") u64::from(number),
            inlateout("x0") a => result,
            in("x1") b,
            in("x2") c,
            in("x3") d,
            in("x4") e,
            in("x5") f,
            options(nostack),
        );
    }
    if result > -4096_i64 as u64 { Err(Errno(-(result as i64) as i32)) } else { Ok(result) }
}

/// System call whose arguments are numbers only, and which accesses no memory of this process.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum NumberCall {
    /// pkey_alloc(2).
    AllocateKey = linux::__NR_pkey_alloc,
    /// close_range(2).
    Close = linux::__NR_close_range,
    /// dup3(2).
    Duplicate = linux::__NR_dup3,
    /// exit_group(2).
    Exit = linux::__NR_exit_group,
    /// kill(2).
    Kill = linux::__NR_kill,
    /// getppid(2).
    ParentId = linux::__NR_getppid,
    /// getpid(2).
    ProcessId = linux::__NR_getpid,
    /// sched_yield(2).
    Yield = linux::__NR_sched_yield,
}

/// Makes a system call with numbers as arguments.
#[inline]
pub fn call_with_numbers(number: NumberCall, [a, b, c, d]: [u64; 4]) -> Result<u64> {
    // SAFETY: none of these calls accesses memory of this process.
    unsafe { call(number as u32, [a, b, c, d, 0, 0]) }
}

/// `struct iovec`: memory range of a vectored call.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Vector {
    /// Address.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Source of a mapping.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backing {
    /// A file from this offset on, shared.
    Shared(u32, u64),
    /// As `Shared`, with all pages present from the beginning.
    Populated(u32, u64),
    /// Private zeroed memory.
    Own,
    /// Zeroed memory shared with the children of this process.
    Family,
}

/// Maps memory at `address`, replacing previous mappings.
///
/// # Safety
/// No Rust object may be in the range, unless the mapping is to replace it.
pub unsafe fn map(address: u64, length: u64, rights: u32, backing: Backing) -> Result<()> {
    let (flags, fd, offset) = match backing {
        Backing::Shared(fd, offset) => (linux::MAP_SHARED, u64::from(fd), offset),
        Backing::Populated(fd, offset) => {
            (linux::MAP_SHARED | linux::MAP_POPULATE, u64::from(fd), offset)
        }
        Backing::Own => (linux::MAP_PRIVATE | linux::MAP_ANONYMOUS, u64::MAX, 0),
        Backing::Family => (linux::MAP_SHARED | linux::MAP_ANONYMOUS, u64::MAX, 0),
    };
    let flags = u64::from(flags | linux::MAP_FIXED);
    // SAFETY: the caller guarantees the range.
    unsafe {
        call(linux::__NR_mmap, [address, length, u64::from(rights), flags, fd, offset]).map(drop)
    }
}

/// Unmaps a range.
///
/// # Safety
/// As [`map`].
pub unsafe fn unmap(address: u64, length: u64) -> Result<()> {
    // SAFETY: the caller guarantees the range.
    unsafe { call(linux::__NR_munmap, [address, length, 0, 0, 0, 0]).map(drop) }
}

/// Changes the rights of a range.
///
/// # Safety
/// The program must not access its own memory in the range in a way that the rights forbid.
pub unsafe fn protect(address: u64, length: u64, rights: u32) -> Result<()> {
    // SAFETY: the caller guarantees the range.
    unsafe { call(linux::__NR_mprotect, [address, length, rights.into(), 0, 0, 0]).map(drop) }
}

/// Waits until `word` is woken, for `nanoseconds` at most, if its value is `expected`. May return
/// early.
pub fn wait(word: &core::sync::atomic::AtomicU32, expected: u32, nanoseconds: Option<u64>) {
    let time = nanoseconds.map(|all| [all / 1_000_000_000, all % 1_000_000_000]);
    let time = time.as_ref().map_or(0, |time| time.as_ptr() as u64);
    let arguments =
        [word.as_ptr() as u64, u64::from(linux::FUTEX_WAIT), expected.into(), time, 0, 0];
    // SAFETY: it reads the word and the time. Early returns are part of this function's contract.
    let _ = unsafe { call(linux::__NR_futex, arguments) };
}

/// Wakes all waiters of `word`.
pub fn wake(word: &core::sync::atomic::AtomicU32) {
    wake_most(word, i32::MAX as u32);
}

/// Wakes one waiter of `word`; returns whether there was one.
pub fn wake_one(word: &core::sync::atomic::AtomicU32) -> bool {
    wake_most(word, 1) == 1
}

fn wake_most(word: &core::sync::atomic::AtomicU32, most: u32) -> u64 {
    let arguments = [word.as_ptr() as u64, u64::from(linux::FUTEX_WAKE), most.into(), 0, 0, 0];
    // SAFETY: no memory is changed. It cannot fail with a mapped word.
    unsafe { call(linux::__NR_futex, arguments) }.unwrap_or(0)
}

/// Yields this host CPU.
pub fn yield_now() {
    // It cannot fail.
    let _ = call_with_numbers(NumberCall::Yield, [0; 4]);
}

/// Ignores a signal in this process.
pub fn ignore(signal: u32) -> Result<()> {
    // `SIG_IGN`, without flags and mask.
    // SAFETY: no handler is installed.
    unsafe { set_handler(signal, &[1, 0, 0, 0]) }
}

/// Sets the action of a signal: handler, flags, restorer and mask (rt_sigaction(2)).
///
/// # Safety
/// The handler must be sound wherever it may interrupt this process.
pub unsafe fn set_handler(signal: u32, action: &[u64; 4]) -> Result<()> {
    let arguments = [signal.into(), action.as_ptr() as u64, 0, 8, 0, 0];
    // SAFETY: the action is only read; the caller guarantees the handler.
    unsafe { call(linux::__NR_rt_sigaction, arguments).map(drop) }
}

/// Sets the signal stack of this thread, that is, address, flags and length (sigaltstack(2)), and
/// the action of the signals that use it.
///
/// # Safety
/// As [`set_handler`]. The stack must have no other use.
pub unsafe fn set_handlers(
    stack: &[u64; 3],
    mut signals: impl Iterator<Item = u32>,
    action: &[u64; 4],
) -> Result<()> {
    // SAFETY: the description is only read; the caller guarantees the stack and the handler.
    unsafe {
        call(linux::__NR_sigaltstack, [stack.as_ptr() as u64, 0, 0, 0, 0, 0])?;
        signals.try_for_each(|signal| set_handler(signal, action))
    }
}

/// Returns the id of this process.
pub fn process_id() -> u32 {
    // It cannot fail.
    call_with_numbers(NumberCall::ProcessId, [0; 4]).unwrap_or(0) as u32
}

/// Returns the id of the parent process: 0 outside of the PID namespace.
pub fn parent_id() -> u32 {
    // It cannot fail.
    call_with_numbers(NumberCall::ParentId, [0; 4]).unwrap_or(0) as u32
}

/// Sets an attribute of this process whose value is a number (prctl(2)): `PR_SET_NO_NEW_PRIVS`,
/// `PR_SET_DUMPABLE`, `PR_SET_PDEATHSIG` or `PR_SET_SECUREBITS`. Others are refused with `EINVAL`.
pub fn set_attribute(attribute: u32, value: u32) -> Result<()> {
    const NUMBERS: [u32; 4] = [
        prctl::PR_SET_NO_NEW_PRIVS,
        prctl::PR_SET_DUMPABLE,
        prctl::PR_SET_PDEATHSIG,
        prctl::PR_SET_SECUREBITS,
    ];
    if !NUMBERS.contains(&attribute) {
        return Err(Errno(linux_raw_sys::errno::EINVAL as i32));
    }
    // SAFETY: no memory is accessed.
    unsafe { call(linux::__NR_prctl, [attribute.into(), value.into(), 0, 0, 0, 0]).map(drop) }
}

/// Sets the name of this process (prctl(2)).
pub fn set_name(name: &core::ffi::CStr) -> Result<()> {
    let arguments = [prctl::PR_SET_NAME.into(), name.as_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the name is only read up to its end.
    unsafe { call(linux::__NR_prctl, arguments).map(drop) }
}

/// Waits for a child, or with `u64::MAX` for any; returns its id and status (wait4(2)). `None`: no
/// child has changed (`WNOHANG`), or there is none.
pub fn wait_for_child(child: u64, options: u32) -> Option<(u32, u32)> {
    let mut status = 0_u32;
    let arguments = [child, &raw mut status as u64, options.into(), 0, 0, 0];
    // SAFETY: the kernel writes the status.
    let child = unsafe { call(linux::__NR_wait4, arguments) }.unwrap_or(0) as u32;
    (child != 0).then_some((child, status))
}

/// Replaces the set of blocked signals of this thread: bit `n - 1` stands for signal `n`.
pub fn set_signal_mask(mask: u64) -> Result<()> {
    change_signal_mask(linux::SIG_SETMASK, mask)
}

/// Changes the set of blocked signals of this thread (`how` of sigprocmask(2)).
pub fn change_signal_mask(how: u32, mask: u64) -> Result<()> {
    let arguments = [how.into(), &raw const mask as u64, 0, 8, 0, 0];
    // SAFETY: the mask is only read.
    unsafe { call(linux::__NR_rt_sigprocmask, arguments).map(drop) }
}

/// Opens a descriptor that is readable while one of these blocked signals is pending, and reads as
/// `struct signalfd_siginfo` (signalfd(2)). Reads never block, and an executed program does not
/// inherit it.
pub fn open_signals(mask: u64, fd: u32) -> Result<()> {
    /// `SFD_NONBLOCK`, `SFD_CLOEXEC`.
    const FLAGS: u64 = (linux::O_NONBLOCK | linux::O_CLOEXEC) as u64;
    let arguments = [u64::MAX, &raw const mask as u64, 8, FLAGS, 0, 0];
    // SAFETY: the mask is only read.
    let lowest = unsafe { call(linux::__NR_signalfd4, arguments) }?;
    let number = [lowest, fd.into(), linux::O_CLOEXEC.into(), 0];
    call_with_numbers(NumberCall::Duplicate, number)?;
    close(lowest as u32, lowest as u32)
}

/// Waits for a blocked signal of the set, and returns its number (sigtimedwait(2)).
pub fn wait_for_signal(mask: u64) -> Result<u32> {
    let arguments = [&raw const mask as u64, 0, 0, 8, 0, 0];
    // SAFETY: the mask is only read.
    unsafe { call(linux::__NR_rt_sigtimedwait, arguments) }.map(|signal| signal as u32)
}

/// Reads a clock: seconds and nanoseconds, 0 if the host does not have it (clock_gettime(2)).
pub fn time(clock: u32) -> [u64; 2] {
    let mut time = [0; 2];
    let arguments = [clock.into(), time.as_mut_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the kernel writes the time.
    let _ = unsafe { call(linux::__NR_clock_gettime, arguments) };
    time
}

/// Creates a timer that sends a signal; returns its id (timer_create(2)).
pub fn create_timer(clock: u32, signal: u32) -> Result<u32> {
    // `struct sigevent`: value, signal number, kind of notification.
    let event = [0, u64::from(signal) | u64::from(linux::SIGEV_SIGNAL) << 32, 0, 0, 0, 0, 0, 0];
    let mut timer = 0_u32;
    let arguments = [clock.into(), event.as_ptr() as u64, &raw mut timer as u64, 0, 0, 0];
    // SAFETY: the kernel reads the description and writes the id.
    unsafe { call(linux::__NR_timer_create, arguments) }?;
    Ok(timer)
}

/// Sets a timer to its period and its first time, each in seconds and nanoseconds
/// (timer_settime(2)).
pub fn set_timer(timer: u64, times: &[u64; 4]) -> Result<()> {
    let arguments = [timer, 0, times.as_ptr() as u64, 0, 0, 0];
    // SAFETY: the times are only read.
    unsafe { call(linux::__NR_timer_settime, arguments).map(drop) }
}

/// Reads the set of CPUs on which this thread may run (sched_getaffinity(2)).
pub fn affinity(set: &mut [u64]) -> Result<()> {
    let arguments = [0, size_of_val(set) as u64, set.as_mut_ptr() as u64, 0, 0, 0];
    // SAFETY: the kernel writes at most this length.
    unsafe { call(linux::__NR_sched_getaffinity, arguments).map(drop) }
}

/// Installs a seccomp filter in this process irrevocably (seccomp(2)).
pub fn set_filter(instructions: &[u64]) -> Result<()> {
    /// `SECCOMP_SET_MODE_FILTER`.
    const SET_MODE_FILTER: u64 = 1;
    let length = u16::try_from(instructions.len())
        .map_err(|_| Errno(linux_raw_sys::errno::EINVAL as i32))?;
    // `struct sock_fprog`.
    let program = [length.into(), instructions.as_ptr() as u64];
    let arguments = [SET_MODE_FILTER, 0, program.as_ptr() as u64, 0, 0, 0];
    // SAFETY: the filter is only read, and has this length.
    unsafe { call(linux::__NR_seccomp, arguments).map(drop) }
}

/// Lets a program decide which devices the processes of a cgroup of version 2, and of those below
/// it, may use (bpf(2)); `instructions` are `struct bpf_insn`. It stays as long as the cgroup.
pub fn set_device_filter(cgroup: i32, instructions: &[u64]) -> Result<()> {
    /// `BPF_PROG_LOAD`.
    const LOAD: u64 = 5;
    /// `BPF_PROG_ATTACH`.
    const ATTACH: u64 = 8;
    /// `BPF_PROG_TYPE_CGROUP_DEVICE`.
    const TYPE: u64 = 15;
    /// `BPF_CGROUP_DEVICE`.
    const EVENT: u64 = 6;
    /// `BPF_F_ALLOW_MULTI`: programs of cgroups below it are run, too.
    const ALLOW_MULTI: u64 = 2;
    let license = c"MIT";
    // Fields of 32 bits of `union bpf_attr` are pairs here.
    let load = [
        TYPE | (instructions.len() as u64) << 32,
        instructions.as_ptr() as u64,
        license.as_ptr() as u64,
    ];
    let arguments = [LOAD, load.as_ptr() as u64, size_of_val(&load) as u64, 0, 0, 0];
    // SAFETY: the record, the program and the string are only read, and have these lengths.
    let program = unsafe { call(linux::__NR_bpf, arguments)? };
    let attach = [u64::from(cgroup as u32) | program << 32, EVENT | ALLOW_MULTI << 32];
    let arguments = [ATTACH, attach.as_ptr() as u64, size_of_val(&attach) as u64, 0, 0, 0];
    // SAFETY: the record is only read.
    let attached = unsafe { call(linux::__NR_bpf, arguments).map(drop) };
    // The cgroup keeps the program.
    let _ = call_with_numbers(NumberCall::Close, [program, program, 0, 0]);
    attached
}

/// Sets a resource limit of this process and its children irrevocably (setrlimit(2)).
pub fn limit(resource: u32, value: u64) -> Result<()> {
    let limit = [value, value];
    let arguments = [resource.into(), limit.as_ptr() as u64, 0, 0, 0, 0];
    // SAFETY: the limit is only read.
    unsafe { call(linux::__NR_setrlimit, arguments).map(drop) }
}

/// Change of mounts.
#[derive(Clone, Copy, Debug)]
pub struct MountChange {
    /// They become read-only.
    pub makes_read_only: bool,
    /// Their propagation becomes this one (`MS_PRIVATE` and others, mount(2)).
    pub propagation: Option<u32>,
}

/// Changes the mount that a descriptor of its root (open_tree(2)) stands for, and those below it
/// (mount_setattr(2)). Linux before 5.12 has no such call, and returns `ENOSYS`.
pub fn change_mounts(mount: u32, change: MountChange) -> Result<()> {
    const FLAGS: u32 = linux::AT_EMPTY_PATH | linux::AT_RECURSIVE;
    let attributes = linux::mount_attr {
        attr_set: u64::from(change.makes_read_only) * u64::from(linux::MOUNT_ATTR_RDONLY),
        attr_clr: 0,
        propagation: change.propagation.unwrap_or(0).into(),
        userns_fd: 0,
    };
    let (path, length) = (c"".as_ptr() as u64, size_of_val(&attributes) as u64);
    let at = &raw const attributes as u64;
    let arguments = [mount.into(), path, FLAGS.into(), at, length, 0];
    // SAFETY: path and attributes are only read, and have this length.
    unsafe { call(linux::__NR_mount_setattr, arguments).map(drop) }
}

/// Fills `to` with random bytes; `false` if the host has none yet.
pub fn random(to: &mut [u8]) -> bool {
    let arguments = [to.as_mut_ptr() as u64, to.len() as u64, linux::GRND_NONBLOCK.into(), 0, 0, 0];
    // SAFETY: the caller owns the bytes.
    let filled = unsafe { call(linux::__NR_getrandom, arguments) };
    filled == Ok(to.len() as u64)
}

/// Sends a signal to a process.
pub fn kill(process: u32, signal: u32) {
    // It fails if the process has ended, which its parent detects.
    let _ = call_with_numbers(NumberCall::Kill, [process.into(), signal.into(), 0, 0]);
}

/// Writes bytes; returns the number of bytes written at once.
pub fn write(fd: u32, bytes: &[u8]) -> Result<usize> {
    let arguments = [fd.into(), bytes.as_ptr() as u64, bytes.len() as u64, 0, 0, 0];
    // SAFETY: the bytes are only read.
    unsafe { call(linux::__NR_write, arguments) }.map(|count| count as usize)
}

/// Reads the available bytes; returns their number.
pub fn read(fd: u32, to: &mut [u8]) -> Result<usize> {
    let arguments = [fd.into(), to.as_mut_ptr() as u64, to.len() as u64, 0, 0, 0];
    // SAFETY: the caller owns the bytes.
    unsafe { call(linux::__NR_read, arguments) }.map(|count| count as usize)
}

/// Closes the descriptors from `first` to `last`.
pub fn close(first: u32, last: u32) -> Result<()> {
    call_with_numbers(NumberCall::Close, [first.into(), last.into(), 0, 0]).map(drop)
}

/// Marks the descriptors from `first` on as close-on-exec: programs that are started later do not
/// inherit them. Linux before 5.11 has no such call, and returns `EINVAL` (close_range(2)).
pub fn close_at_exec(first: u32) -> Result<()> {
    /// `CLOSE_RANGE_CLOEXEC` (linux/close_range.h).
    const CLOEXEC: u64 = 1 << 2;
    let arguments = [first.into(), u32::MAX.into(), CLOEXEC, 0];
    call_with_numbers(NumberCall::Close, arguments).map(drop)
}

/// Ends the process.
pub fn exit(code: u8) -> ! {
    let _ = call_with_numbers(NumberCall::Exit, [code.into(), 0, 0, 0]);
    loop {
        core::hint::spin_loop();
    }
}
