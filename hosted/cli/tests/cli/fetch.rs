//! Debian's packages for AArch64, from stand-ins for apt and a mirror.

use crate::support::{Folder, code, errors, image_arm64};
use std::fs::{self, File};
use std::process::Output;
use std::time::{Duration, SystemTime};

const DESCRIPTION: &str = "\
[system]
board = \"qemu-virt\"

[[vm]]
name = \"linux\"
memory = \"64M\"
kernel = \"debian\"
";

/// Finds the folder of the lists among apt's arguments; `word` is the last one.
const ARGUMENTS: &str =
    "for word; do case $word in Dir::State::Lists=*) lists=${word#*=} ;; esac; done";

/// A mirror that has one version of the kernel, `mirror/version`; none: it cannot be reached.
struct Mirror(Folder);

impl Mirror {
    fn new() -> Self {
        let folder = Folder::new(DESCRIPTION);
        fs::create_dir_all(folder.path("mirror/boot")).unwrap();
        fs::create_dir(folder.path("tools")).unwrap();
        folder.write("mirror/boot/vmlinuz-1", &image_arm64());
        let mirror = folder.path("mirror").display().to_string();
        let get = format!(
            "{ARGUMENTS}\n\
             lost() {{ echo \"E: Failed to fetch $word  404  Not Found\" >&2; exit 100; }}\n\
             case $* in\n\
             *' update') echo >>{mirror}/updates\n\
             cp {mirror}/version $lists/mirror_Packages || lost ;;\n\
             *) [ \"${{word#*=}}\" = \"$(cat {mirror}/version)\" ] || lost; : >package.deb ;;\n\
             esac"
        );
        folder.script("tools/apt-get", &get);
        let show = format!(
            "{ARGUMENTS}\nversion=$(cat $lists/mirror_Packages)\n\
             echo \"Depends: linux-image-a (= $version)\""
        );
        folder.script("tools/apt-cache", &show);
        folder.script("tools/dpkg-deb", &format!("exec tar -C {mirror} -c boot"));
        Self(folder)
    }

    fn offer(&self, version: &str) {
        self.0.write("mirror/version", version.as_bytes());
    }

    /// Builds an image with the kernel; returns the version, and the errors.
    fn build(&self) -> (String, String) {
        let output = self.try_build();
        let text = errors(&output);
        assert_eq!(code(&output), 0, "{text}");
        let version = text.split("linux-image-a ").nth(1).unwrap();
        (version.split(' ').next().unwrap().trim_end_matches(',').to_owned(), text)
    }

    fn try_build(&self) -> Output {
        let path = format!("{}:{}", self.0.path("tools").display(), std::env::var("PATH").unwrap());
        let build = ["system", "build", "system.toml", "-o", "image"];
        self.0.parador(&build).env("PATH", path).output().unwrap()
    }

    /// Number of updates of the lists.
    fn updates(&self) -> usize {
        self.0.read("mirror/updates").len()
    }

    /// Folder of the kernel's files.
    fn kernel(&self, version: &str) -> String {
        let mut names = self.0.list("cache/parador").into_iter();
        let name = names.find(|name| name.starts_with(&format!("linux-image-a_{version}_")));
        format!("cache/parador/{}", name.unwrap())
    }
}

#[test]
fn replaced_packages_are_found_by_an_update() {
    let mirror = Mirror::new();
    mirror.offer("1");
    assert_eq!((mirror.build().0, mirror.updates()), ("1".to_owned(), 1));
    assert_eq!((mirror.build().0, mirror.updates()), ("1".to_owned(), 1));
    mirror.offer("2");
    fs::remove_dir_all(mirror.0.path(&mirror.kernel("1"))).unwrap();
    assert_eq!((mirror.build().0, mirror.updates()), ("2".to_owned(), 2));
}

#[test]
fn old_lists_are_updated() {
    let mirror = Mirror::new();
    mirror.offer("1");
    mirror.build();
    mirror.offer("2");
    let age = || {
        let stamp = File::open(mirror.0.path("cache/parador/apt-arm64/updated")).unwrap();
        stamp.set_modified(SystemTime::now() - Duration::from_secs(25 * 60 * 60)).unwrap();
    };
    age();
    assert_eq!((mirror.build().0, mirror.updates()), ("2".to_owned(), 2));
    // Without a network what is there is used, and the next build does not wait for it again.
    age();
    fs::remove_file(mirror.0.path("mirror/version")).unwrap();
    let (version, text) = mirror.build();
    assert_eq!((version.as_str(), mirror.updates()), ("2", 3));
    assert!(text.contains("apt-get cannot get the lists of packages: E: Failed"), "{text}");
    assert_eq!((mirror.build().0, mirror.updates()), ("2".to_owned(), 3));
    fs::remove_dir_all(mirror.0.path(&mirror.kernel("2"))).unwrap();
    let output = mirror.try_build();
    assert_eq!(code(&output), 69);
    let text = errors(&output);
    assert!(text.contains("run the same command again") && !text.contains("update`"), "{text}");
}

#[test]
fn empty_files_are_fetched_again() {
    let mirror = Mirror::new();
    mirror.offer("1");
    mirror.build();
    let kernel = format!("{}/vmlinuz", mirror.kernel("1"));
    mirror.0.write(&kernel, b"");
    mirror.build();
    assert_eq!(mirror.0.read(&kernel), image_arm64());
    let left: Vec<_> = mirror.0.list("cache/parador");
    assert!(left.iter().all(|name| !name.starts_with('.')), "{left:?}");
}
