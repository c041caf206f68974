//! Images of containers from archives: OCI image layouts and `docker save`.
//!
//! An image becomes a read-only ext4 file system in the user's cache, since only a file system
//! keeps the owners, modes and attributes that an ordinary user cannot give to files of the host.
//! A first pass over all layers verifies digests, limits and paths; a second one writes. No path of
//! an archive is ever used on the host.
//!
//! | module | contents |
//! |---|---|
//! | `limits` | bounds for input of strangers |
//! | `source` | the archive's files |
//! | `manifest` | its documents |
//! | `layer` | compression and digests of layers |
//! | `archive` | entries of a tar archive |
//! | `tree` | what the layers make together |
//! | `ext4` | the file system |
#![forbid(unsafe_code)]

mod archive;
mod ext4;
mod layer;
mod limits;
mod manifest;
mod source;
#[cfg(feature = "testing")]
pub mod testing;
mod tree;

use archive::{Visited, refused};
use ext4::Writer;
use hosted_command::digest::digest;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::interrupt::Interruptible;
use hosted_command::lock::Lock;
use hosted_command::messages;
use hosted_command::steps::Steps;
use hosted_command::store::{Kind, Store, UseLock};
use manifest::{ArchivedImage, Layer};
use serde::{Deserialize, Serialize};
use source::ImageFiles;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use tree::Tree;

pub use source::is_compressed;

/// Images in the cache.
const KIND: Kind = Kind { folder: "images", record: RECORD, item: "image" };
/// File with the [`Record`] of an image.
const RECORD: &str = "image.json";
/// File with the root file system of an image.
const DISK: &str = "root.ext4";
/// Version of the file system's form; images of another one are unpacked again.
const FORMAT: u32 = 2;
/// Number of images that are kept.
const KEPT: usize = 8;

/// Description of an unpacked image.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    format: u32,
    /// SHA-256 of the image's configuration.
    digest: String,
    /// Length of the file system in bytes.
    bytes: u64,
}

/// Archive of an image.
#[derive(Debug)]
pub struct ImageArchive {
    path: PathBuf,
    source: ImageFiles,
}

/// Image whose root file system is in the cache.
#[derive(Debug)]
pub struct UnpackedImage {
    /// ext4 file system, to be used read-only.
    pub disk: PathBuf,
    /// Settings of its command.
    pub settings: Settings,
    /// Keeps the file system in the cache.
    _held: UseLock,
}

/// Settings of an image's command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Environment, as `NAME=VALUE`.
    pub environment: Vec<String>,
    /// Program and arguments; may be empty.
    pub command: Vec<String>,
    /// Working directory.
    pub folder: Option<String>,
    /// User, and perhaps group after a colon, by name or number; empty: root.
    pub user: String,
}

impl ImageArchive {
    /// Opens the archive at `path`; `None`: it is none.
    ///
    /// # Errors
    /// It cannot be read or is malformed: 65, 66, 71 or 77.
    pub fn open(path: &Path) -> Result<Option<Self>, Failure> {
        let source = ImageFiles::open(path).map_err(|error| failed(path, &error))?;
        let source = source.filter(manifest::is_known);
        Ok(source.map(|source| Self { path: path.to_owned(), source }))
    }

    /// Unpacks the image into the cache, unless it is there.
    ///
    /// # Errors
    /// The image is refused: 65. The cache cannot be written, or has too little space.
    pub fn unpack(&self) -> Result<UnpackedImage, Failure> {
        self.unpack_into(&Store::open(KIND)?)
    }

    fn unpack_into(&self, store: &Store) -> Result<UnpackedImage, Failure> {
        let failed = |error: io::Error| failed(&self.path, &error);
        let image = manifest::find(&self.source).map_err(failed)?;
        let format = FORMAT.to_le_bytes();
        let name = format!("image-{}", &digest([&format[..], image.digest.as_bytes()])[..32]);
        let interruptible = Interruptible::new()?;
        let find = |folder: &Path| find(folder, &image.digest);
        let make = |work: &Path, lock: &Lock| {
            let made = work.join("made");
            fs::create_dir(&made).file_error("create the folder", &made)?;
            lock.note("checking the layers");
            let mut tree = read_tree(&self.source, &image.layers).map_err(failed)?;
            if let Some(folder) = settings(&image).folder {
                tree.add_missing_folder(folder.as_bytes(), image.layers.len());
            }
            let path = made.join(DISK);
            let file = File::create_new(&path).file_error("create", &path)?;
            let writer = Writer::new(&tree, &file).map_err(failed)?;
            store.check_room(writer.bytes())?;
            lock.note("writing the file system");
            write(writer, &self.source, &image).map_err(failed)?;
            write_record(&made, &file, &image).file_error("write", &made)?;
            Ok(made)
        };
        let ((), held, is_new) = store.get(&name, &interruptible, &Steps::stderr(), find, make)?;
        let folder = store.folder().join(name);
        if is_new {
            // Images that cannot be removed stay.
            let _ = prune(store);
        }
        Ok(UnpackedImage { disk: folder.join(DISK), settings: settings(&image), _held: held })
    }
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    let of_contents = [ErrorKind::InvalidData, ErrorKind::UnexpectedEof, ErrorKind::Other];
    match error.raw_os_error() {
        // Errors of the archive, not of the system; decoders have kinds of their own.
        None if of_contents.contains(&error.kind()) || error.kind() == ErrorKind::InvalidInput => {
            // It quotes names of the archive.
            let reason = messages::printable(&error.to_string());
            let text = format!("cannot use the image in {}: {reason}", path.display());
            Failure::new(failure::BAD_CONFIG, text)
        }
        _ => Failure::file("unpack", path, error),
    }
}

/// Returns whether a folder has the image with this digest.
fn find(folder: &Path, digest: &str) -> Option<()> {
    let record: Record = serde_json::from_slice(&fs::read(folder.join(RECORD)).ok()?).ok()?;
    let length = fs::metadata(folder.join(DISK)).ok()?.len();
    let is_good = record.format == FORMAT && record.digest == digest && record.bytes == length;
    is_good.then_some(())
}

fn write_record(made: &Path, file: &File, image: &ArchivedImage) -> io::Result<()> {
    let bytes = file.metadata()?.len();
    let record = Record { format: FORMAT, digest: image.digest.clone(), bytes };
    fs::write(made.join(RECORD), serde_json::to_vec_pretty(&record)?)
}

/// Calls `visit` with each entry of all layers: number of the layer, number of the entry, entry.
fn entries(
    source: &ImageFiles,
    layers: &[Layer],
    mut visit: impl FnMut(usize, usize, Visited<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let mut bytes = 0;
    for (number, layer) in layers.iter().enumerate() {
        let mut index = 0;
        let visit = |visited: Visited<'_>| {
            index += 1;
            visit(number, index, visited)
        };
        let digest = layer.digest.as_deref();
        let file = source.file(&layer.file)?;
        let read = layer::entries(file, digest, &layer.contents, &mut bytes, visit);
        read.map_err(|error| {
            let (number, count) = (number + 1, layers.len());
            match error.raw_os_error() {
                None => refused(format!("layer {number} of {count}: {error}")),
                Some(_) => error,
            }
        })?;
    }
    Ok(())
}

/// Reads all layers without their data, and verifies them.
fn read_tree(source: &ImageFiles, layers: &[Layer]) -> io::Result<Tree> {
    let mut tree = Tree::new();
    entries(source, layers, |layer, index, Visited { entry, .. }| {
        let name = String::from_utf8_lossy(&entry.path.join(&b'/')).into_owned();
        let added = tree.add(entry, layer, index);
        added.map_err(|error| refused(format!("entry {name}: {error}")))
    })?;
    Ok(tree)
}

/// Writes the file system. The layers are verified again, as they may change meanwhile.
fn write(mut writer: Writer<'_>, source: &ImageFiles, image: &ArchivedImage) -> io::Result<()> {
    let mut uuid = [0; 16];
    for (byte, digits) in uuid.iter_mut().zip(image.digest.as_bytes().chunks(2)) {
        let digits = std::str::from_utf8(digits).unwrap_or_default();
        *byte = u8::from_str_radix(digits, 16).unwrap_or_default();
    }
    writer.write_metadata(uuid)?;
    entries(source, &image.layers, |layer, index, visited| {
        writer.write_data((layer, index), visited.data)
    })?;
    writer.finish()
}

/// Removes all but the most recently used images.
fn prune(store: &Store) -> Result<(), Failure> {
    let used = |folder: &PathBuf| {
        let metadata = fs::metadata(folder);
        metadata.and_then(|metadata| metadata.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
    };
    let mut folders = store.all()?;
    folders.sort_by_key(|folder| std::cmp::Reverse(used(folder)));
    store.remove(folders.split_off(KEPT.min(folders.len()))).map(drop)
}

fn settings(image: &ArchivedImage) -> Settings {
    let Some(config) = image.config.config() else { return Settings::default() };
    let list = |list: &Option<Vec<String>>| list.clone().unwrap_or_default();
    let folder = config.working_dir().clone();
    Settings {
        environment: list(config.env()),
        command: [list(config.entrypoint()), list(config.cmd())].concat(),
        folder: folder.filter(|folder| !folder.is_empty()),
        user: config.user().clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
