//! Target `kernel`: a kernel image from a user, with a command line and an initial RAM disk.
//!
//! Two bytes: length of the RAM disk; one byte: length of the command line, which follows. The rest
//! is the image. It is rejected, or loaded without overlaps, ready to start.

use hw_tables::pvh::{Module, StartInfo};
use vmm_boot::testing::{bzimage, elf_kernel, elf_kernel_32, multiboot_kernel};
use vmm_boot::{BootConfig, InitialState, Kernel, load};
use vmm_machine::layout_with_pci;
use vmm_mem::GuestMemory;
use vmm_mem::testing::memory;

use crate::input::{Input, Seed};

/// RAM at 0, and more above 4 GiB.
const RAM: [(u64, u64); 2] = [(0, 4 << 20), (4 << 30, 1 << 20)];
const MIB: u64 = 1 << 20;

thread_local! {
    /// Created once. Memory that is not loaded is not read, so inputs do not influence each other.
    static MEMORY: GuestMemory = memory(&RAM);
}

/// Runs an input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let initrd: Vec<u8> = (0..input.half()).map(|index| (index % 251) as u8).collect();
    let length = input.byte();
    let command_line = input.bytes(length.into());
    let config = BootConfig {
        layout: &layout_with_pci(),
        vcpus: 2,
        kernel: input.rest(),
        initrd: Some(&initrd),
        command_line,
    };
    MEMORY.with(|ram| {
        let loaded = load(ram, &config);
        match Kernel::detect(config.kernel) {
            Ok(kernel) => {
                let needed = kernel.memory_needed(initrd.len() as u64);
                assert!(kernel.memory_needed(u64::MAX) >= needed);
                if let Ok(state) = &loaded {
                    assert!(needed <= RAM[0].1);
                    check(ram, &kernel, state, &config);
                }
            }
            Err(error) => assert_eq!(loaded.as_ref().err(), Some(&error)),
        }
        if let Err(error) = loaded {
            assert!(!error.to_string().is_empty());
        }
    });
}

/// Checks that the guest finds all parts, complete.
fn check(ram: &GuestMemory, kernel: &Kernel<'_>, state: &InitialState, config: &BootConfig<'_>) {
    let read = |address: u64, length: usize| {
        let mut bytes = vec![0; length];
        ram.read_slice(address, &mut bytes).expect("reported ranges are in memory");
        bytes
    };
    let (line, rsdp, disk) = match kernel {
        // `boot_params`: fields of Linux' boot.rst and zero-page.rst.
        Kernel::BzImage(_) => {
            assert!((MIB..RAM[0].1).contains(&state.rip));
            let word = |offset| u64::from(ram.read::<u32>(state.rsi + offset).expect("in memory"));
            let rsdp = ram.read::<u64>(state.rsi + 0x70).expect("in memory");
            (word(0x228), rsdp, (word(0x218), word(0x21c)))
        }
        Kernel::Pvh(_) => {
            let info = StartInfo::parse(&read(state.rbx, StartInfo::LENGTH)).expect("it is whole");
            let modules = read(info.module_list, info.modules as usize * Module::LENGTH);
            let disk = Module::list(&modules).next().map(|module| (module.address, module.size));
            (info.command_line, info.rsdp, disk.unwrap_or_default())
        }
        // Information structure: fields of the Multiboot specification, 3.3. The tables are in the
        // area that such kernels search.
        Kernel::Multiboot(_) => {
            assert_eq!(state.rax, 0x2bad_b002);
            let word = |address| u64::from(ram.read::<u32>(address).expect("in memory"));
            let disk = match word(state.rbx + 20) {
                0 => (0, 0),
                _ => {
                    let module = word(state.rbx + 24);
                    (word(module), word(module + 4) - word(module))
                }
            };
            (word(state.rbx + 16), 0xe_0000, disk)
        }
    };
    let text = read(line, config.command_line.len() + 1);
    assert_eq!(text.split_last(), Some((&0, config.command_line)));
    assert_eq!(read(rsdp, 8), b"RSD PTR ");
    let initrd = config.initrd.unwrap_or_default();
    assert_eq!(disk.1, initrd.len() as u64);
    assert!(initrd.is_empty() || disk.0 >= MIB);
    assert_eq!(read(disk.0, initrd.len()), initrd);
}

/// Initial inputs.
pub fn seeds() -> Vec<(&'static str, Seed)> {
    let seed = |initrd, line: &str, image: &[u8]| {
        Seed::new().half(initrd).byte(line.len() as u8).bytes(line.as_bytes()).bytes(image)
    };
    // The kernel needs 64 KiB from 1 MiB on.
    let mut linux = bzimage(96);
    linux[0x258..0x260].copy_from_slice(&MIB.to_le_bytes());
    linux[0x260..0x264].copy_from_slice(&(64_u32 << 10).to_le_bytes());
    // The only space for the RAM disk is directly after the kernel.
    let mut narrow = linux.clone();
    narrow[0x22c..0x230].copy_from_slice(&0x11_1fff_u32.to_le_bytes());
    let elf = elf_kernel(MIB, b"\xf4\xeb\xfd", 0x3000, MIB as u32);
    // Its memory ends at the end of RAM below the hole.
    let large = elf_kernel(2 * MIB, &[0x90; 64], 2 * MIB, 2 * MIB as u32);
    vec![
        ("linux", seed(5000, "console=ttyS0", &linux)),
        ("linux-cut-short", seed(0, "", &linux[..1040])),
        ("linux-narrow", seed(0x1000, "quiet", &narrow)),
        ("pvh", seed(100, "quiet", &elf)),
        ("pvh-cut-short", seed(0, "", &elf[..100])),
        ("pvh-large", seed(0, "", &large)),
        ("pvh-32", seed(10, "", &elf_kernel_32(MIB as u32, b"\xf4\xeb\xfd", 0x3000, MIB as u32))),
        ("multiboot", seed(100, "quiet", &multiboot_kernel(MIB as u32, b"\xf4\xeb\xfd", 0x3000))),
    ]
}
