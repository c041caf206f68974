use super::*;
use hosted_monitor::config::BuiltInitrd;
use std::ffi::OsString;

fn parse(words: &[&str]) -> Result<(Config, Vec<String>), Failure> {
    describe(Line::parse(words.iter().map(OsString::from))?)
}

fn config(words: &[&str]) -> Config {
    parse(words).unwrap_or_else(|failure| panic!("{failure}")).0
}

/// The shared directories as text.
fn shares(config: &Config) -> Vec<String> {
    let shares = config.share.iter().map(|share| serde_json::to_value(share).unwrap());
    shares.map(|share| format!("{}:{}", share["path"], share["tag"]).replace('"', "")).collect()
}

#[test]
fn virtme_ng() {
    let line = "-name virtme-ng|-m|512M|-fsdev|local,id=virtfs5,path=/,security_model=none,\
        readonly=on,multidevs=remap|-device|virtio-9p-pci,fsdev=virtfs5,mount_tag=/dev/root|\
        -fsdev|local,id=virtfs9,path=/a,,b,security_model=none,multidevs=remap|\
        -device|virtio-9p-pci,fsdev=virtfs9,mount_tag=virtme.initmount0|\
        -device|i6300esb,id=watchdog0|-machine|q35|-cpu|max|-parallel|none|-net|none|-smp|2|\
        -vga|none|-display|none|-serial|chardev:console|\
        -chardev|file,id=console,path=/proc/self/fd/2|\
        -chardev|stdio,id=stdin,signal=on,mux=off|-device|virtio-serial-pci|\
        -device|virtserialport,name=virtme.stdin,chardev=stdin|\
        -chardev|file,id=stdout,path=/proc/self/fd/1|-device|virtio-serial-pci|\
        -device|virtserialport,name=virtme.stdout,chardev=stdout|\
        -chardev|file,id=ret,path=/tmp/ret|-device|virtio-serial-pci|\
        -device|virtserialport,name=virtme.ret,chardev=ret|-no-reboot|\
        -device|virtio-net-pci,netdev=n0|-netdev|user,id=n0|-kernel|./vmlinuz|\
        -append|virtme_console=ttyS0 init=/bin/sh";
    let words: Vec<&str> = line
        .split('|')
        .flat_map(|word| match word {
            "-name virtme-ng" => vec!["-name", "virtme-ng"],
            word => vec![word],
        })
        .collect();
    let (config, ignored) = parse(&words).unwrap();
    assert_eq!(shares(&config), ["/:/dev/root", "/a,b:virtme.initmount0"]);
    assert_eq!(config.share.iter().map(|share| share.ro).collect::<Vec<_>>(), [true, false]);
    assert_eq!(config.vm.serial, Some(Target::File("/proc/self/fd/2".into())));
    assert_eq!((config.vm.memory, config.vm.cpus), (Some(Size(512 << 20)), Some(2)));
    let ports: Vec<_> = config.port.iter().map(|port| port.target.clone()).collect();
    let files = ["/proc/self/fd/1", "/tmp/ret"].map(|path| Target::File(path.into()));
    assert_eq!(ports, [&[Target::Stdio][..], &files].concat());
    assert_eq!((config.net.len(), config.vm.on_reset), (1, Some(OnExit::Code(0))));
    assert!(config.vm.console.is_none());
    let wanted = [
        "-name virtme-ng",
        "-parallel none",
        "-device i6300esb,id=watchdog0",
        "-machine q35",
        "-cpu max",
    ];
    for text in wanted {
        assert!(ignored.iter().any(|ignored| ignored == text), "{text}: {ignored:?}");
    }
    config.validate(true).map(drop).unwrap();
}

#[test]
fn fakemachine() {
    let config = config(&[
        "-smp",
        "2",
        "-m",
        "2048",
        "-kernel",
        "/boot/vmlinuz",
        "-initrd",
        "initramfs.cpio",
        "-display",
        "none",
        "-no-reboot",
        "-device",
        "virtio-serial",
        "-chardev",
        "null,id=for-ttyS0",
        "-serial",
        "chardev:for-ttyS0",
        "-chardev",
        "stdio,id=for-hvc0,signal=off",
        "-device",
        "virtconsole,chardev=for-hvc0",
        "-virtfs",
        "local,mount_tag=usr,path=/usr,security_model=none,multidevs=remap",
        "-virtfs",
        "local,mount_tag=virtfs-0,path=/etc/ssl,security_model=none,multidevs=remap",
        "-drive",
        "file=/tmp/x.img,if=none,format=raw,cache=unsafe,id=drive-virtio-disk0",
        "-device",
        "virtio-blk-pci,drive=drive-virtio-disk0,id=virtio-disk0,serial=fakedisk-0",
        "-append",
        "console=ttyS0 panic=-1 systemd.unit=fakemachine.service",
        "-nic",
        "none",
    ]);
    assert_eq!(config.vm.serial, Some(Target::Null));
    let console = config.vm.console.as_ref().unwrap();
    assert_eq!((&console.target, console.kernel), (&Some(Target::Stdio), false));
    assert_eq!(shares(&config), ["/usr:usr", "/etc/ssl:virtfs-0"]);
    let disk = serde_json::to_value(&config.disk[0]).unwrap();
    assert_eq!((&disk["path"], &disk["id"]), (&json!("/tmp/x.img"), &json!("fakedisk-0")));
    assert_eq!(config.vm.memory, Some(Size(2 << 30)));
    assert!(config.net.is_empty());
    assert_eq!(config.validate(true).unwrap().console_parameters(), "console=ttyS0");
}

#[test]
fn debvm() {
    let config = config(&[
        "-device",
        "virtio-net-pci,netdev=net0",
        "-append",
        "root=LABEL=debvm rw console=ttyS0",
        "-netdev",
        "user,id=net0,hostfwd=tcp:127.0.0.1:2222-:22,domainname=example.org",
        "-nographic",
        "-device",
        "virtio-rng-pci,rng=rng0",
        "-smp",
        "2",
        "-cpu",
        "host",
        "-machine",
        "type=q35,accel=kvm:tcg",
        "-no-user-config",
        "-name",
        "debvm-run a.img",
        "-m",
        "1G",
        "-kernel",
        "k",
        "-initrd",
        "i",
        "-drive",
        "media=disk,format=raw,discard=unmap,file=a.img,if=virtio,cache=unsafe",
        "-object",
        "rng-random,filename=/dev/urandom,id=rng0",
    ]);
    assert_eq!(
        (config.vm.serial, config.vm.backend),
        (Some(Target::Stdio), Some(BackendChoice::Auto))
    );
    let net = serde_json::to_value(&config.net[0]).unwrap();
    assert_eq!(net["hostfwd"], json!(["tcp:2222:22"]));
    assert_eq!(net["address"], json!("10.0.2.15"));
    assert_eq!((config.disk.len(), config.vm.on_reset), (1, Some(OnExit::Reset)));
}

#[test]
fn microvm() {
    // QEMU's own example (docs/system/i386/microvm.rst there).
    let line = "-M|microvm,x-option-roms=off,pit=off,pic=off,isa-serial=off,rtc=off|-m|512m|-smp|2|\
        -kernel|k|-nodefaults|-no-user-config|-nographic|-chardev|stdio,id=virtiocon0|\
        -device|virtio-serial-device|-device|virtconsole,chardev=virtiocon0|\
        -drive|id=test,file=test.img,format=raw,if=none|-device|virtio-blk-device,drive=test|\
        -netdev|tap,id=tap0,ifname=t0,script=no,downscript=no|-device|virtio-net-device,netdev=tap0";
    let config = config(&line.split('|').collect::<Vec<_>>());
    assert_eq!(config.vm.console.as_ref().unwrap().target, Some(Target::Stdio));
    assert_eq!((config.disk.len(), config.net.len()), (1, 1));
}

#[test]
fn disks_follow_the_devices() {
    let config = config(&[
        "-kernel",
        "k",
        "-nodefaults",
        "-drive",
        "file=last,if=virtio,readonly",
        "-drive",
        "file=b.qcow2,if=none,id=b,format=qcow2",
        "-drive",
        "file=a,if=none,id=a",
        "-device",
        "virtio-blk,drive=a",
        "-device",
        "virtio-blk-pci-non-transitional,drive=b",
    ]);
    let paths: Vec<_> = config.disk.iter().map(|disk| disk.path.to_str().unwrap()).collect();
    assert_eq!(paths, ["a", "b.qcow2", "last"]);
    assert!(config.disk[2].ro && config.net.is_empty());
    assert_eq!(config.vm.serial, Some(Target::Null), "-nodefaults");
}

#[test]
fn networks() {
    let count = |words: &[&str]| config(&[&["-kernel", "k"], words].concat()).net.len();
    assert_eq!(count(&["-nic", "none"]), 0);
    assert_eq!(
        count(&["-net", "none", "-netdev", "user,id=n", "-device", "virtio-net,netdev=n"]),
        1
    );
    assert_eq!(
        count(&[
            "-nic",
            "user,model=virtio,mac=02:00:00:00:00:01",
            "-nic",
            "tap,ifname=t,script=no"
        ]),
        2
    );
    let config = config(&[
        "-kernel",
        "k",
        "-net",
        "nic,model=virtio,macaddr=02:00:00:00:00:01",
        "-net",
        "user,hostfwd=tcp::5555-10.0.2.15:22,hostfwd=::2299-:22",
    ]);
    let net = serde_json::to_value(&config.net[0]).unwrap();
    assert_eq!(
        (&net["mac"], &net["hostfwd"]),
        (&json!("02:00:00:00:00:01"), &json!(["tcp:5555:22", "tcp:2299:22"]))
    );
}

#[test]
fn processors_and_memory() {
    let cpus = |text: &str| config(&["-kernel", "k", "-nodefaults", "-smp", text]).vm.cpus;
    assert_eq!(cpus("4"), Some(4));
    assert_eq!(cpus("cpus=3,sockets=1,maxcpus=8"), Some(3));
    assert_eq!(cpus("sockets=2,cores=2,threads=1"), Some(4));
    assert_eq!(cpus("64"), Some(8));
    // As QEMU 7.2, hw/core/machine-smp.c.
    assert_eq!(cpus("maxcpus=4"), Some(4));
    assert_eq!(cpus("sockets=2,maxcpus=8"), Some(8));
    assert_eq!(cpus("sockets=1,dies=2,cores=2"), Some(4));
    for (text, bytes) in
        [("2048", 2 << 30), ("size=1g,slots=2,maxmem=4G", 1 << 30), ("1048576K", 1 << 30)]
    {
        assert_eq!(memory(text).unwrap(), bytes, "{text}");
    }
    for text in ["", "0", "1.5G", "1X", "-1", "M", "99999999999999T", "1G,size=", "1G,speed=2"] {
        assert_eq!(memory(text).unwrap_err().code(), 64, "{text}");
    }
}

#[test]
fn interactive_consoles() {
    // virtme-ng without a command: the kernel's messages go to standard error.
    let (config, ignored) = parse(&[
        "-kernel",
        "k",
        "-nodefaults",
        "-chardev",
        "file,path=/proc/self/fd/2,id=dmesg",
        "-device",
        "virtio-serial-pci",
        "-device",
        "virtconsole,chardev=dmesg",
        "-chardev",
        "stdio,id=console,signal=off,mux=on",
        "-serial",
        "chardev:console",
        "-mon",
        "chardev=console",
        "-echr",
        "1",
    ])
    .unwrap();
    assert_eq!(config.vm.serial, Some(Target::Stdio));
    assert_eq!(ignored, ["-echr 1", "-device virtio-serial-pci", "-mon chardev=console"]);
    config.validate(true).map(drop).unwrap();
}

#[test]
fn a_port_on_standard_output_replaces_the_serial_line() {
    let port = ["-chardev", "stdio,id=p", "-device", "virtserialport,chardev=p,name=p"];
    let words = [&["-kernel", "k", "-nic", "none"], &port[..]].concat();
    let config = config(&words);
    assert_eq!(config.vm.serial, Some(Target::Null));
    config.validate(true).map(drop).unwrap();
}

#[test]
fn a_ram_disk_is_a_file_if_there_is_one() {
    let initrd = |path: &str| {
        let words = ["-kernel", "k", "-nodefaults", "-initrd", path];
        config(&words).vm.initrd.unwrap()
    };
    assert_eq!(initrd("Cargo.toml"), Path::new("./Cargo.toml"));
    assert_eq!(initrd("/i"), Path::new("/i"));
    assert!(BuiltInitrd::of(&initrd("busybox")).is_some(), "there is no such file");
}

#[test]
fn wrong_lines() {
    for (words, code, said) in [
        (&["-smp", "0"][..], 64, "`cpus` must be 1 or more"),
        (&["-smp", "two"], 64, "`cpus`"),
        (&["-smp", "2,speed=9"], 64, "unknown parameter `speed`"),
        (&["-m", "lots"], 64, "invalid size `lots`"),
        (&["-device", "e1000"], 64, "unknown device `e1000`"),
        (&["-device", "virtio-blk-pci"], 64, "`drive` is missing"),
        (&["-device", "virtio-blk-pci,drive=x"], 64, "ID `x`"),
        (&["-device", "virtio-net-pci,netdev=x"], 64, "no free -netdev"),
        (&["-device", "virtio-9p-pci,fsdev=x,mount_tag=y"], 64, "no free -fsdev"),
        (&["-device", "virtserialport,name=a"], 64, "`chardev` is missing"),
        (&["-device", "virtserialport,name=a,chardev=x"], 64, "no -chardev has the ID `x`"),
        (
            &["-device", "virtio-rng-pci,id=a", "-device", "virtio-rng-pci,id=a"],
            64,
            "duplicate ID `a`",
        ),
        (
            &["-drive", "if=none,file=a,id=d", "-drive", "if=none,file=b,id=d"],
            64,
            "duplicate ID `d`",
        ),
        (&["-drive", "if=virtio"], 64, "`file` is missing"),
        (&["-drive", "if=none,file=a"], 64, "`id` is missing"),
        (&["-drive", "if=virtio,file=a,speed=9"], 64, "unknown parameter `speed`"),
        (&["-drive", "file=a"], 69, "no IDE disks"),
        (&["-drive", "file=a,if=pflash"], 69, "no firmware"),
        (&["-drive", "file=a,if=virtio,format=vmdk"], 69, "raw or qcow2"),
        (&["-drive", "file=a,if=virtio,snapshot=on"], 69, "overlay=on"),
        (&["-drive", "file=a,if=virtio,media=cdrom"], 69, "CD-ROM"),
        (&["-device", "virtio-scsi-pci"], 69, "no SCSI"),
        (&["-virtfs", "local,path=/"], 64, "`mount_tag` is missing"),
        (&["-virtfs", "local,path=/,mount_tag=a b"], 64, "printable"),
        (&["-virtfs", "local,path=/,mount_tag=a,security_model=mapped"], 69, "security_model"),
        (&["-fsdev", "proxy,id=a,path=/"], 69, "local folders"),
        (&["-netdev", "bridge,id=a"], 69, "no network `bridge`"),
        (&["-netdev", "user"], 64, "`id` is missing"),
        (&["-netdev", "user,id=a", "-netdev", "user,id=a"], 64, "duplicate ID `a`"),
        (&["-nic", "user,model=e1000"], 69, "model must be virtio"),
        (&["-net", "nic"], 64, "belong together"),
        (&["-nic", "user,hostfwd=tcp:x"], 64, "invalid port forwarding"),
        (&["-serial", "stdio", "-serial", "pty"], 69, "one serial line"),
        (&["-serial", "chardev:x"], 64, "no -chardev"),
        (&["-monitor", "stdio"], 69, "no QEMU monitor"),
        (&["-mon", "chardev=x,mode=control"], 69, "no QEMU monitor"),
        (&["-display", "gtk"], 69, "no graphics"),
        (&["-machine", "virt"], 69, "no board `virt`"),
        (&["-machine", "q35,memory-backend=mem"], 64, "unknown parameter `memory-backend`"),
        (&["-accel", "hvf"], 64, "unknown accelerator `hvf`"),
        (&["-object", "memory-backend-memfd,id=mem"], 64, "unknown object `memory-backend-memfd`"),
    ] {
        let failure = parse(&[&["-kernel", "k"], words].concat()).unwrap_err();
        assert_eq!(failure.code(), code, "{words:?}: {failure}");
        assert!(failure.to_string().contains(said), "{words:?}: {failure}");
    }
    let failure = parse(&["-m", "1G"]).unwrap_err();
    assert_eq!(failure.code(), 69);
    assert!(failure.to_string().contains("no firmware"));
}

#[test]
fn accelerators() {
    let backend = |words: &[&str]| {
        config(&[&["-kernel", "k", "-nodefaults"], words].concat()).vm.backend.unwrap()
    };
    assert_eq!(backend(&[]), BackendChoice::Auto);
    assert_eq!(backend(&["-accel", "tcg,thread=multi"]), BackendChoice::Process);
    assert_eq!(backend(&["-accel", "tcg", "-accel", "kvm"]), BackendChoice::Auto);
    assert_eq!(backend(&["-machine", "accel=kvm:tcg"]), BackendChoice::Auto);
    assert_eq!(
        backend(&["-machine", "pc-i440fx-7.2,accel=tcg", "-M", "usb=off"]),
        BackendChoice::Process
    );
    assert_eq!(backend(&["--enable-kvm", "-cpu", "host"]), BackendChoice::Auto);
    // The last one counts.
    let (kvm, tcg) = ("accel=kvm", "accel=tcg");
    assert_eq!(backend(&["-machine", kvm, "-machine", tcg]), BackendChoice::Process);
    assert_eq!(backend(&["-machine", tcg, "-M", "q35,accel=kvm"]), BackendChoice::Auto);
    assert_eq!(backend(&["-enable-kvm", "-machine", tcg]), BackendChoice::Process);
    assert_eq!(backend(&["-machine", tcg, "-enable-kvm"]), BackendChoice::Auto);
}
