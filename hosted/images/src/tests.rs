//! Archives made here, good and malicious.

use super::*;
use std::collections::BTreeMap;
use std::process::Command;
use tar::{Builder, EntryType, Header};

/// Tar archive that is being built.
struct TarBuilder(Builder<Vec<u8>>);

impl TarBuilder {
    fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    /// Adds an entry; names are not checked, unlike those of the crate's own methods.
    fn raw(mut self, name: &str, kind: EntryType, link: &str, mode: u32, data: &[u8]) -> Self {
        let mut header = Header::new_ustar();
        let bytes = header.as_mut_bytes();
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        bytes[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(1000);
        header.set_gid(100_000);
        header.set_mtime(5_000_000_000);
        header.set_size(data.len() as u64);
        header.set_cksum();
        self.0.append(&header, data).unwrap();
        self
    }

    fn file(self, name: &str, data: &[u8]) -> Self {
        self.raw(name, EntryType::Regular, "", 0o4755, data)
    }

    fn folder(self, name: &str) -> Self {
        self.raw(name, EntryType::Directory, "", 0o1750, b"")
    }

    fn symlink(self, name: &str, target: &str) -> Self {
        self.raw(name, EntryType::Symlink, target, 0o777, b"")
    }

    fn hardlink(self, name: &str, target: &str) -> Self {
        self.raw(name, EntryType::Link, target, 0o644, b"")
    }

    fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut bytes = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let length = (1..).find(|n: &usize| n.to_string().len() + rest == *n).unwrap();
            bytes.extend(format!("{length} {key}=").bytes());
            bytes.extend(*value);
            bytes.push(b'\n');
        }
        self.raw("pax", EntryType::XHeader, "", 0, &bytes)
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }
}

fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    hosted_command::digest::hexadecimal(&sha2::Sha256::digest(bytes))
}

/// Compression of a layer.
type Pack = fn(&[u8]) -> Vec<u8>;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut packed = Vec::new();
    let mut encoder = flate2::read::GzEncoder::new(bytes, flate2::Compression::fast());
    io::copy(&mut encoder, &mut packed).unwrap();
    packed
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

/// Files of an archive, by name.
type Files = BTreeMap<String, Vec<u8>>;

fn config(layers: &[Vec<u8>], machine: &str) -> Vec<u8> {
    let ids: Vec<String> =
        layers.iter().map(|layer| format!("\"sha256:{}\"", sha256(layer))).collect();
    format!(
        "{{\"architecture\":\"{machine}\",\"os\":\"linux\",\"config\":{{\"User\":\"web\",\
         \"Env\":[\"A=1\"],\"Entrypoint\":[\"/bin/a\"],\"Cmd\":[\"b\"],\"WorkingDir\":\"/srv\",\
         \"Volumes\":null}},\"rootfs\":{{\"type\":\"layers\",\"diff_ids\":[{}]}}}}",
        ids.join(",")
    )
    .into_bytes()
}

fn put(files: &mut Files, bytes: Vec<u8>) -> String {
    let digest = sha256(&bytes);
    files.insert(format!("blobs/sha256/{digest}"), bytes);
    digest
}

fn descriptor(kind: &str, digest: &str, more: &str) -> String {
    format!("{{\"mediaType\":\"{kind}\",\"digest\":\"sha256:{digest}\",\"size\":1{more}}}")
}

/// Adds an image to the files of a layout; returns its descriptor.
fn image(files: &mut Files, layers: &[Vec<u8>], packs: &[Pack], machine: &str) -> String {
    let config = put(files, config(layers, machine));
    let packed = layers.iter().zip(packs.iter().cycle());
    let packed = packed.map(|(layer, pack)| {
        descriptor("application/vnd.oci.image.layer.v1.tar", &put(files, pack(layer)), "")
    });
    let packed: Vec<_> = packed.collect();
    let config = descriptor("application/vnd.oci.image.config.v1+json", &config, "");
    let manifest =
        format!("{{\"schemaVersion\":2,\"config\":{config},\"layers\":[{}]}}", packed.join(","));
    let platform = format!(",\"platform\":{{\"os\":\"linux\",\"architecture\":\"{machine}\"}}");
    let digest = put(files, manifest.into_bytes());
    descriptor("application/vnd.oci.image.manifest.v1+json", &digest, &platform)
}

fn layout(mut files: Files, images: &[String]) -> Files {
    let index = format!("{{\"schemaVersion\":2,\"manifests\":[{}]}}", images.join(","));
    files.insert("index.json".into(), index.into_bytes());
    files.insert("oci-layout".into(), b"{\"imageLayoutVersion\":\"1.0.0\"}".to_vec());
    files
}

fn docker(layers: &[Vec<u8>]) -> Files {
    let mut files = Files::new();
    let config = config(layers, "amd64");
    let name = format!("{}.json", sha256(&config));
    let names: Vec<_> = (0..layers.len()).map(|index| format!("\"{index}/layer.tar\"")).collect();
    let manifest = format!(
        "[{{\"Config\":\"{name}\",\"RepoTags\":[\"a:1\"],\"Layers\":[{}]}}]",
        names.join(",")
    );
    files.insert(name, config);
    files.insert("manifest.json".into(), manifest.into_bytes());
    let layers = layers.iter().enumerate();
    files.extend(layers.map(|(index, layer)| (format!("{index}/layer.tar"), layer.clone())));
    files
}

fn tar_of(files: &Files) -> Vec<u8> {
    let all = files.iter().map(|(name, bytes)| (name.as_str(), bytes));
    all.fold(TarBuilder::new(), |tar, (name, bytes)| tar.file(name, bytes)).bytes()
}

/// Folder with a cache and an archive.
struct Place {
    folder: tempfile::TempDir,
    store: Store,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("images");
        fs::create_dir(&cache).unwrap();
        Self { store: Store::at(cache, KIND), folder }
    }

    fn archive(&self, files: &Files) -> ImageArchive {
        let path = self.folder.path().join("archive.tar");
        fs::write(&path, tar_of(files)).unwrap();
        ImageArchive::open(&path).unwrap().unwrap()
    }

    /// Unpacks an archive; returns the reason if it is refused, in which case nothing is left.
    fn unpack(&self, files: &Files) -> Result<UnpackedImage, String> {
        let unpacked = self.archive(files).unpack_into(&self.store);
        unpacked.map_err(|failure| {
            assert_eq!(failure.code(), failure::BAD_CONFIG, "{failure}");
            assert_eq!(fs::read_dir(self.store.folder()).unwrap().count(), 0);
            failure.to_string()
        })
    }
}

/// Runs a program of e2fsprogs on a file system.
fn tool(program: &str, options: &[&str], disk: &Path) -> String {
    let output = Command::new(program).args(options).arg(disk).output().expect("e2fsprogs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{program} {options:?}: {text}");
    text
}

/// Returns an entry of a directory: mode, owner, group, name, size.
fn listed(disk: &Path, folder: &str, name: &str) -> Option<String> {
    let text = tool("debugfs", &["-R", &format!("ls -p {folder}")], disk);
    let line = text.lines().find(|line| line.split('/').nth(5) == Some(name))?;
    Some(line.splitn(3, '/').nth(2).unwrap().to_owned())
}

fn cat(disk: &Path, file: &str) -> String {
    tool("debugfs", &["-R", &format!("cat {file}")], disk)
}

fn layers() -> Vec<Vec<u8>> {
    let large = vec![7_u8; 100_000];
    let long = "x".repeat(200);
    let below = TarBuilder::new()
        .folder("./")
        .folder("etc/")
        .file("etc/old", b"old")
        .file("etc/kept", b"kept")
        .folder("gone")
        .file("gone/a", b"a")
        .folder("opaque")
        .file("opaque/lower", b"lower")
        .pax(&[
            ("SCHILY.xattr.security.capability", b"\x01\0\0\x02caps"),
            ("path", b"usr/bin/tool"),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
        ])
        .file("usr/bin/t", &large)
        .hardlink("usr/bin/second", "usr/bin/tool")
        .hardlink("usr/bin/third", "//usr/bin/tool")
        .symlink("bin", "usr/bin")
        .symlink("long", &long[..90])
        .raw("fifo", EntryType::Fifo, "", 0o600, b"");
    let above = TarBuilder::new()
        .file("etc/old", b"newer")
        .file(".wh.gone", b"")
        .file("opaque/upper", b"upper")
        .file("opaque/.wh..wh..opq", b"")
        .file(".wh..wh.plnk", b"");
    vec![below.bytes(), above.bytes()]
}

#[test]
fn layers_make_a_file_system() {
    let plain: Pack = <[u8]>::to_vec;
    let mut kinds = vec![docker(&layers())];
    for packs in [[plain, gzip as Pack], [zstd, plain]] {
        let mut files = Files::new();
        let other = image(&mut files, &layers()[..1], &packs, "arm64");
        let own = image(&mut files, &layers(), &packs, "amd64");
        kinds.push(layout(files, &[other, own]));
    }
    for files in kinds {
        let place = Place::new();
        let unpacked = place.unpack(&files).unwrap();
        let disk = unpacked.disk.as_path();
        tool("e2fsck", &["-f", "-n"], disk);
        let list = |folder: &str, name: &str| listed(disk, folder, name);
        let is = |text: &str| Some(text.to_owned());
        assert_eq!(list("/etc", "old"), is("104755/1000/100000/old/5/"));
        assert_eq!(list("/", "etc"), is("041750/1000/100000/etc//"));
        assert_eq!(list("/usr/bin", "tool"), is("104755/1000/100000/tool/100000/"));
        assert_eq!(list("/", "usr"), is("040755/0/0/usr//"), "no layer describes it");
        assert_eq!(list("/", "srv"), is("040755/0/0/srv//"), "the working directory");
        assert_eq!(list("/", "fifo"), is("010600/1000/100000/fifo/0/"));
        assert_eq!(list("/", "bin"), is("120777/1000/100000/bin/7/"));
        assert_eq!(list("/", "gone"), None);
        assert_eq!(list("/opaque", "lower"), None);
        assert_eq!(list("/opaque", ".wh..wh..opq"), None);
        assert_eq!(cat(disk, "/etc/old"), "newer");
        assert_eq!(cat(disk, "/etc/kept"), "kept");
        assert_eq!(cat(disk, "/opaque/upper"), "upper");
        assert_eq!(cat(disk, "/usr/bin/second"), "\u{7}".repeat(100_000));
        let stat = tool("debugfs", &["-R", "stat /usr/bin/second"], disk);
        assert!(stat.contains("Links: 3") && stat.contains("security.capability (8)"), "{stat}");
        assert!(!stat.contains("trusted"), "{stat}");
        assert!(stat.contains("2128"), "the time of modification: {stat}");
        let expected = Settings {
            environment: vec!["A=1".into()],
            command: vec!["/bin/a".into(), "b".into()],
            folder: Some("/srv".into()),
            user: "web".into(),
        };
        assert_eq!(unpacked.settings, expected);
        // The second use reads no layer.
        let path = place.folder.path().join("archive.tar");
        let archive = ImageArchive::open(&path).unwrap().unwrap();
        let before = fs::metadata(disk).unwrap().modified().unwrap();
        assert_eq!(archive.unpack_into(&place.store).unwrap().disk, disk);
        assert_eq!(fs::metadata(disk).unwrap().modified().unwrap(), before);
    }
}

#[test]
fn a_folder_is_a_layout() {
    let place = Place::new();
    let mut files = Files::new();
    let own = image(&mut files, &layers(), &[zstd], "amd64");
    let folder = place.folder.path().join("layout");
    for (name, bytes) in layout(files, &[own]) {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let archive = ImageArchive::open(&folder).unwrap().unwrap();
    let unpacked = archive.unpack_into(&place.store).unwrap();
    assert_eq!(cat(&unpacked.disk, "/etc/old"), "newer");
    assert!(ImageArchive::open(place.folder.path()).unwrap().is_none());
}

#[test]
fn attacks_are_refused_before_anything_is_written() {
    let long = "x/".repeat(130) + "x";
    let new = TarBuilder::new;
    let huge = vec![b'x'; limits::MAX_HEADER as usize + 1];
    let value = vec![b'x'; 4096];
    let half = &huge[..huge.len() / 2];
    let long_name = |tar: TarBuilder| tar.raw("l", EntryType::GNULongName, "", 0, half);
    let many = |kind| {
        let headers = (0..5).fold(new(), |tar, _| tar.raw("h", kind, "", 0, b"9 uid=77\n"));
        headers.file("a", b"")
    };
    let attacks: Vec<(TarBuilder, &str)> = vec![
        (new().file("../outside", b""), "`..`"),
        (new().file("a/../../outside", b""), "`..`"),
        (new().file("/etc/passwd", b""), "an absolute path"),
        (new().pax(&[("path", b"../outside")]).file("a", b""), "`..`"),
        (new().symlink("a", "/etc").file("a/passwd", b""), "through a symbolic link"),
        (new().symlink("a", "..").folder("a/b"), "through a symbolic link"),
        (new().symlink("a", "/etc").file("a/.wh.passwd", b""), "through a symbolic link"),
        (new().symlink("a", "/etc").hardlink("b", "a/passwd"), "through a symbolic link"),
        (new().file("a", b"").file("a/b", b""), "through a file"),
        (new().hardlink("a", "../../etc/passwd"), "`..`"),
        (new().hardlink("a", "/etc/passwd"), "not in the image"),
        (new().hardlink("a", "/../etc/passwd"), "`..`"),
        (new().hardlink("a", "etc/passwd"), "not in the image"),
        (new().folder("a").hardlink("b", "a"), "hard link to a directory"),
        (new().raw("dev/sda", EntryType::Block, "", 0o600, b""), "a device node"),
        (new().raw("dev/kmem", EntryType::Char, "", 0o600, b""), "a device node"),
        (new().raw("a", EntryType::new(b'V'), "", 0o600, b""), "unknown type"),
        (new().raw("a", EntryType::GNUSparse, "", 0o600, b""), "a sparse file"),
        (new().pax(&[("GNU.sparse.major", b"1")]).file("a", b""), "a sparse file"),
        (new().pax(&[("size", b"9")]).file("a", b""), "bytes"),
        (new().file(".wh.", b""), "a whiteout without a name"),
        (new().file("a/.wh...", b""), "a whiteout without a name"),
        (new().symlink("./", "/"), "no directory"),
        (new().symlink("a", ""), "without a valid target"),
        (new().pax(&[("path", long.as_bytes())]).file("a", b""), "components"),
        (new().pax(&[("path", &[b'x'; 256])]).file("a", b""), "255 bytes"),
        (new().pax(&[("path", &huge)]).file("a", b""), "extended header"),
        (new().raw("l", EntryType::GNULongName, "", 0, &huge).file("a", b""), "extended header"),
        (many(EntryType::XHeader), "more than 4 extended headers"),
        (many(EntryType::XGlobalHeader), "more than 4 extended headers"),
        (many(EntryType::GNULongLink), "more than 4 extended headers"),
        (long_name(new().pax(&[("comment", half)])).file("a", b""), "extended headers of an entry"),
        (new().pax(&[("SCHILY.xattr.user.a", &value)]).file("a", b""), "do not fit"),
    ];
    let place = Place::new();
    for (attack, reason) in attacks {
        let reasons = place.unpack(&docker(&[new().folder("a").bytes(), attack.bytes()]));
        let text = reasons.unwrap_err();
        // Attributes have their limit in the file system.
        let is_placed = text.contains("layer 2 of 2") || reason == "do not fit";
        assert!(text.contains(reason) && is_placed, "{reason}: {text}");
    }
}

/// Returns a header of Unix version 7, whose numbers are blank but for its size.
fn old_header(name: &str, blank: u8) -> Header {
    let mut header = Header::new_old();
    let old = header.as_old_mut();
    old.name[..name.len()].copy_from_slice(name.as_bytes());
    for field in [&mut old.mode, &mut old.uid, &mut old.gid] {
        field.fill(blank);
    }
    old.mtime.fill(blank);
    old.linkflag = [0];
    header.set_size(0);
    header.set_cksum();
    header
}

#[test]
fn headers_of_version_7() {
    let mut tar = TarBuilder::new();
    for (name, blank) in [("folder/", b' '), ("folder/file", b' '), ("zeros/", 0)] {
        tar.0.append(&old_header(name, blank), &b""[..]).unwrap();
    }
    // Of its own type, a file stays one.
    let layer = tar.file("later/", b"text").bytes();
    let place = Place::new();
    let disk = place.unpack(&docker(&[layer])).unwrap().disk;
    tool("e2fsck", &["-f", "-n"], &disk);
    let is = |text: &str| Some(text.to_owned());
    assert_eq!(listed(&disk, "/", "folder"), is("040000/0/0/folder//"));
    assert_eq!(listed(&disk, "/", "zeros"), is("040000/0/0/zeros//"));
    assert_eq!(listed(&disk, "/folder", "file"), is("100000/0/0/file/0/"));
    assert_eq!(cat(&disk, "/later"), "text");
}

#[test]
fn an_entry_has_several_extended_headers() {
    let layer = TarBuilder::new()
        .raw("g", EntryType::XGlobalHeader, "", 0, b"12 comment=a\n")
        .raw("l", EntryType::GNULongName, "", 0, b"name\0")
        .raw("l", EntryType::GNULongLink, "", 0, b"target\0")
        .pax(&[("uid", b"77")])
        .symlink("a", "b")
        .pax(&[("uid", b"78")])
        .file("c", b"");
    let place = Place::new();
    let disk = place.unpack(&docker(&[layer.bytes()])).unwrap().disk;
    assert_eq!(listed(&disk, "/", "name").as_deref(), Some("120777/77/100000/name/6/"));
    assert_eq!(listed(&disk, "/", "c").as_deref(), Some("104755/78/100000/c/0/"));
}

#[test]
fn a_symbolic_link_does_not_carry_a_lower_layer() {
    // The directory of the first layer becomes a link; the third layer goes through it.
    let first = TarBuilder::new().folder("a").file("a/b", b"").bytes();
    let second = TarBuilder::new().symlink("a", "/etc").bytes();
    let third = TarBuilder::new().file("a/passwd", b"").bytes();
    let text = Place::new().unpack(&docker(&[first, second, third])).unwrap_err();
    assert!(
        text.contains("layer 3 of 3: entry a/passwd: a path through a symbolic link"),
        "{text}"
    );
}

#[test]
fn digests_are_verified() {
    let mut good = Files::new();
    let own = image(&mut good, &layers(), &[gzip], "amd64");
    let good = layout(good, &[own]);
    let blobs: Vec<_> = good.keys().filter(|name| name.starts_with("blobs/")).cloned().collect();
    assert_eq!(blobs.len(), 4);
    let place = Place::new();
    for name in blobs {
        let mut files = good.clone();
        let blob = files.get_mut(&name).unwrap();
        // A comment of JSON's white space, or bytes after the last frame.
        blob.push(b' ');
        let text = place.unpack(&files).unwrap_err();
        let expected = ["digest", "gzip", "unexpected end"];
        assert!(expected.iter().any(|reason| text.contains(reason)), "{text}");
        files.remove(&name);
        assert!(place.unpack(&files).unwrap_err().contains("has no file"));
    }
    let mut files = docker(&layers());
    files.insert("0/layer.tar".into(), layers()[1].clone());
    assert!(place.unpack(&files).unwrap_err().contains("the layer's contents have the digest"));
    files.insert("0/layer.tar".into(), layers()[0][..700].to_vec());
    assert!(place.unpack(&files).unwrap_err().contains("layer 1 of 2"));
    place.unpack(&docker(&layers())).unwrap();
}

#[test]
fn one_image_for_the_guests_platform_is_needed() {
    let place = Place::new();
    let mut files = Files::new();
    let plain: Pack = <[u8]>::to_vec;
    let machines = ["arm64", "s390x"].map(|one| image(&mut files, &layers(), &[plain], one));
    let text = place.unpack(&layout(files.clone(), &machines)).unwrap_err();
    assert!(text.contains("no image for linux/amd64, but for linux/arm64, linux/s390x"), "{text}");
    let own = image(&mut files, &layers(), &[plain], "amd64");
    let other = image(&mut files, &layers()[..1], &[plain], "amd64");
    let text = place.unpack(&layout(files.clone(), &[own.clone(), other])).unwrap_err();
    assert!(text.contains("several images: sha256:"), "{text}");
    assert!(place.unpack(&layout(Files::new(), &[])).unwrap_err().contains("has no image"));
    // An index in the index, and the record of a build beside it.
    let nested = format!("{{\"schemaVersion\":2,\"manifests\":[{own}]}}");
    let digest = put(&mut files, nested.into_bytes());
    let nested = descriptor("application/vnd.oci.image.index.v1+json", &digest, "");
    let record = descriptor(
        "application/vnd.oci.image.manifest.v1+json",
        &"0".repeat(64),
        ",\"platform\":{\"os\":\"unknown\",\"architecture\":\"unknown\"}",
    );
    place.unpack(&layout(files, &[nested, record])).unwrap();
}

/// Adds an index of these descriptors to the files of a layout; returns its descriptor.
fn index(files: &mut Files, entries: &[String]) -> String {
    let index = format!("{{\"schemaVersion\":2,\"manifests\":[{}]}}", entries.join(","));
    let digest = put(files, index.into_bytes());
    descriptor("application/vnd.oci.image.index.v1+json", &digest, "")
}

#[test]
fn repeated_indexes_are_read_once() {
    let place = Place::new();
    let mut files = Files::new();
    let own = image(&mut files, &layers(), &[gzip], "amd64");
    // Each names the one below 200 times: 1.6 billion reads.
    let nested =
        (0..limits::MAX_NESTING).fold(own, |below, _| index(&mut files, &vec![below; 200]));
    place.unpack(&layout(files, &[nested])).unwrap();
}

#[test]
fn the_number_of_manifests_is_limited() {
    let place = Place::new();
    let mut files = Files::new();
    let other = image(&mut files, &layers(), &[gzip], "arm64");
    let half = vec![other; limits::MAX_MANIFESTS / 2];
    let text = place.unpack(&layout(files.clone(), &half)).unwrap_err();
    assert!(text.contains("no image for linux/amd64, but for linux/arm64\n"), "{text}");
    let nested = index(&mut files, &half);
    let all = [&half[..], &[nested]].concat();
    let text = place.unpack(&layout(files, &all)).unwrap_err();
    assert!(text.contains("its indexes have more than 1000 entries"), "{text}");
}

#[test]
fn manifests_with_the_same_configuration_are_one_image() {
    let place = Place::new();
    let mut files = Files::new();
    let plain: Pack = <[u8]>::to_vec;
    let own = [plain, gzip, zstd].map(|pack| image(&mut files, &layers(), &[pack], "amd64"));
    place.unpack(&layout(files.clone(), &own)).unwrap();
    let place = Place::new();
    let images: Vec<String> = (0..20)
        .map(|number| {
            let layer = TarBuilder::new().file("number", &[number]).bytes();
            image(&mut files, &[layer], &[plain], "amd64")
        })
        .collect();
    let text = place.unpack(&layout(files, &images)).unwrap_err();
    assert!(text.contains(" and 12 more"), "{text}");
}

#[test]
fn names_of_an_archive_are_plain_text_in_messages() {
    let place = Place::new();
    let layer = TarBuilder::new().file("../\x1b[2J\nparador: all is well\n", b"").bytes();
    let text = place.unpack(&docker(&[layer])).unwrap_err();
    assert!(text.contains("entry ../?[2J?parador: all is well?: "), "{text:?}");
}

#[test]
fn times_after_the_last_one_of_ext4_are_that() {
    let place = Place::new();
    let layer = TarBuilder::new().pax(&[("mtime", b"17179869183")]).file("late", b"").bytes();
    let unpacked = place.unpack(&docker(&[layer])).unwrap();
    let stat = tool("debugfs", &["-R", "stat late"], &unpacked.disk);
    assert!(stat.contains("mtime: 0x7fffffff:00000003"), "{stat}");
}

#[test]
fn malformed_documents_are_refused() {
    let place = Place::new();
    for (name, contents) in [
        ("manifest.json", "[]"),
        ("manifest.json", "{"),
        ("manifest.json", "[{\"Config\":\"../x\",\"Layers\":[]}]"),
        ("oci-layout", "{\"imageLayoutVersion\":\"2.0.0\"}"),
        ("oci-layout", "{\"imageLayoutVersion\":\"1.0.0\"}"),
    ] {
        place.unpack(&Files::from([(name.into(), contents.into())])).unwrap_err();
    }
    let mut files = docker(&layers());
    let long = vec![b' '; limits::MAX_DOCUMENT as usize + 1];
    files.insert("manifest.json".into(), long);
    assert!(place.unpack(&files).unwrap_err().contains("has more than 4194304 bytes"));
    let layers = vec![TarBuilder::new().bytes(); limits::MAX_LAYERS + 1];
    assert!(place.unpack(&docker(&layers)).unwrap_err().contains("at most 127"));
}

#[test]
fn layers_that_images_share_may_be_links() {
    let place = Place::new();
    let mut files = docker(&layers());
    let bytes = files.remove("1/layer.tar").unwrap();
    let tar = files.iter().fold(TarBuilder::new(), |tar, (name, bytes)| tar.file(name, bytes));
    let tar = tar.file("2/layer.tar", &bytes).symlink("1/layer.tar", "../2/layer.tar");
    let path = place.folder.path().join("archive.tar");
    fs::write(&path, tar.bytes()).unwrap();
    let archive = ImageArchive::open(&path).unwrap().unwrap();
    assert_eq!(cat(&archive.unpack_into(&place.store).unwrap().disk, "/etc/old"), "newer");
}

#[test]
fn the_last_used_images_are_kept() {
    let place = Place::new();
    let mut disks = Vec::new();
    for number in 0..KEPT + 2 {
        let layer = TarBuilder::new().file("number", number.to_string().as_bytes()).bytes();
        let unpacked = place.unpack(&docker(&[layer])).unwrap();
        let folder = unpacked.disk.parent().unwrap().to_owned();
        drop(unpacked);
        let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1 + number as u64);
        File::open(&folder).unwrap().set_modified(time).unwrap();
        disks.push(folder);
    }
    let is_there: Vec<bool> = disks.iter().map(|disk| disk.is_dir()).collect();
    assert_eq!(is_there.iter().filter(|there| **there).count(), KEPT, "{is_there:?}");
    assert!(!is_there[0] && is_there[KEPT + 1]);
}
