//! Documents of an archive: which image it has, its configuration and its layers.

use crate::archive::refused;
use crate::limits::{MAX_LAYERS, MAX_MANIFESTS, MAX_NESTING};
use crate::source::{ImageFiles, LAYOUT};
use hosted_command::digest::hexadecimal;
use oci_spec::image::{Descriptor, ImageConfiguration, ImageIndex, ImageManifest, OciLayout};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Result;

/// Document of `docker save`.
const DOCKER: &str = "manifest.json";
/// Platform of the guests, as Go names it.
const PLATFORM: (&str, &str) = ("linux", "amd64");
/// Media types of indexes; Docker's own is older.
const INDEXES: [&str; 2] = [
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];
/// Annotation with the name of an image in an index.
const NAME: &str = "org.opencontainers.image.ref.name";
/// Most names in a message.
const SHOWN_NAMES: usize = 8;

/// Layer of an image.
#[derive(Debug, PartialEq, Eq)]
pub struct Layer {
    /// File in the archive.
    pub file: String,
    /// SHA-256 of the file, in hexadecimal; Docker has none.
    pub digest: Option<String>,
    /// SHA-256 of its contents without compression.
    pub contents: String,
}

/// Image in an archive.
#[derive(Debug)]
pub struct ArchivedImage {
    /// SHA-256 of its configuration, which has those of its layers: the image ID.
    pub digest: String,
    /// Configuration.
    pub config: ImageConfiguration,
    /// Layers from the lowest one on.
    pub layers: Vec<Layer>,
}

/// Image as an entry of `manifest.json` describes it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// Returns whether an archive has images of a known kind.
pub fn is_known(source: &ImageFiles) -> bool {
    source.has(LAYOUT) || source.has(DOCKER)
}

/// Finds the image of an archive.
///
/// # Errors
/// There is none for the guests' platform, or more than one; a document is malformed, missing, or
/// has another digest.
pub fn find(source: &ImageFiles) -> Result<ArchivedImage> {
    // Docker writes both since version 25.
    match source.has(LAYOUT) {
        true => find_in_layout(source),
        false => find_of_docker(source),
    }
}

/// Reads a document.
fn parse<T: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| refused(format!("{name}: {error}")))
}

fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

/// Returns the digits of a digest, which must be a SHA-256.
fn digits(digest: &str) -> Result<&str> {
    let digits = digest.strip_prefix("sha256:").filter(|digits| is_sha256(digits));
    digits.ok_or_else(|| refused(format!("the digest {digest} is no SHA-256")))
}

fn is_sha256(digits: &str) -> bool {
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    digits.len() == 64 && digits.bytes().all(is_digit)
}

fn blob(descriptor: &Descriptor) -> Result<(String, &str)> {
    let digits = digits(descriptor.digest().as_ref())?;
    Ok((format!("blobs/sha256/{digits}"), digits))
}

/// Reads the document that a descriptor names, and verifies its digest.
fn document(source: &ImageFiles, descriptor: &Descriptor) -> Result<(String, Vec<u8>)> {
    let (name, digits) = blob(descriptor)?;
    let bytes = source.document(&name)?;
    match sha256(&bytes) == digits {
        true => Ok((name, bytes)),
        false => Err(refused(format!("{name} has another digest than its name"))),
    }
}

/// Manifests of an index and of those in it.
#[derive(Default)]
struct Found {
    /// Number of entries of these indexes.
    entries: usize,
    /// Digests of the indexes.
    indexes: BTreeSet<String>,
    /// Those for the guests' platform, or without a platform, by digest, with their names.
    images: BTreeMap<String, (Descriptor, String)>,
    /// Other platforms.
    others: BTreeSet<String>,
}

impl Found {
    fn collect(&mut self, source: &ImageFiles, index: &ImageIndex, depth: usize) -> Result<()> {
        for descriptor in index.manifests() {
            self.entries += 1;
            if self.entries > MAX_MANIFESTS {
                return Err(refused(format!("its indexes have more than {MAX_MANIFESTS} entries")));
            }
            let digest = descriptor.digest().as_ref().to_owned();
            if INDEXES.contains(&descriptor.media_type().as_ref()) {
                if depth == MAX_NESTING {
                    return Err(refused(format!("more than {MAX_NESTING} nested indexes")));
                }
                // Indexes that name one several times would multiply at each level.
                if self.indexes.insert(digest) {
                    let (name, bytes) = document(source, descriptor)?;
                    self.collect(source, &parse(&name, &bytes)?, depth + 1)?;
                }
                continue;
            }
            let platform = descriptor
                .platform()
                .as_ref()
                .map(|platform| (platform.os().to_string(), platform.architecture().to_string()));
            match &platform {
                // Records of a build, which are no images.
                Some((os, _)) if os == "unknown" => continue,
                Some((os, machine)) if (os.as_str(), machine.as_str()) != PLATFORM => {
                    self.others.insert(format!("{os}/{machine}"));
                    continue;
                }
                _ => {}
            }
            let names = descriptor.annotations().as_ref();
            let name = names.and_then(|names| names.get(NAME)).unwrap_or(&digest).clone();
            self.images.insert(digest, (descriptor.clone(), name));
        }
        Ok(())
    }
}

fn find_in_layout(source: &ImageFiles) -> Result<ArchivedImage> {
    let layout: OciLayout = parse(LAYOUT, &source.document(LAYOUT)?)?;
    if !layout.image_layout_version().starts_with("1.") {
        let version = layout.image_layout_version();
        return Err(refused(format!("version {version} of the image layout is unknown")));
    }
    const INDEX: &str = "index.json";
    let index: ImageIndex = parse(INDEX, &source.document(INDEX)?)?;
    let mut found = Found::default();
    found.collect(source, &index, 0)?;
    let (mut configs, mut first, mut names) = (BTreeSet::new(), None, Vec::new());
    for (descriptor, name) in found.images.values() {
        let (file, bytes) = document(source, descriptor)?;
        let manifest: ImageManifest = parse(&file, &bytes)?;
        // Manifests of one image may differ in the compression of its layers.
        if !configs.insert(manifest.config().digest().as_ref().to_owned()) {
            continue;
        }
        let image = image_of_manifest(source, &manifest)?;
        if is_for_guests(&image.config) {
            names.push(name.as_str());
            // The others are but named: each may have a long configuration.
            first.get_or_insert(image);
        } else {
            found.others.insert(platform(&image.config));
        }
    }
    choose(first, &names, &found.others)
}

/// Returns the only image, which is the first one of these names.
fn choose(
    first: Option<ArchivedImage>,
    names: &[&str],
    others: &BTreeSet<String>,
) -> Result<ArchivedImage> {
    match first {
        Some(image) if names.len() == 1 => Ok(image),
        Some(_) => Err(refused(format!("it has several images: {}", joined(names)))),
        None if others.is_empty() => Err(refused("it has no image")),
        None => {
            let (os, machine) = PLATFORM;
            let others: Vec<&str> = others.iter().map(String::as_str).collect();
            let others = joined(&others);
            Err(refused(format!("it has no image for {os}/{machine}, but for {others}")))
        }
    }
}

/// Joins names for a message, which shows the first ones.
fn joined(names: &[&str]) -> String {
    let shown = &names[..names.len().min(SHOWN_NAMES)];
    match names.len() - shown.len() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

fn is_for_guests(config: &ImageConfiguration) -> bool {
    platform(config) == format!("{}/{}", PLATFORM.0, PLATFORM.1)
}

fn platform(config: &ImageConfiguration) -> String {
    format!("{}/{}", config.os(), config.architecture())
}

fn image_of_manifest(source: &ImageFiles, manifest: &ImageManifest) -> Result<ArchivedImage> {
    let (name, bytes) = document(source, manifest.config())?;
    let config = parse(&name, &bytes)?;
    let files = manifest.layers().iter().map(|layer| {
        let (file, digits) = blob(layer)?;
        Ok((file, Some(digits.to_owned())))
    });
    image(sha256(&bytes), config, files.collect::<Result<_>>()?)
}

fn find_of_docker(source: &ImageFiles) -> Result<ArchivedImage> {
    let images: Vec<DockerImage> = parse(DOCKER, &source.document(DOCKER)?)?;
    let [DockerImage { config: name, layers, .. }] = &images[..] else {
        let names = images.iter().flat_map(|image| image.repo_tags.iter().flatten());
        let names: Vec<&str> = names.map(String::as_str).collect();
        let (count, names) = (images.len(), joined(&names));
        return Err(refused(format!("it has {count} images, one is needed: {names}")));
    };
    let bytes = source.document(name)?;
    let digest = sha256(&bytes);
    let stem = name.rsplit('/').next().unwrap_or(name).trim_end_matches(".json");
    if is_sha256(stem) && stem != digest {
        return Err(refused(format!("{name} has another digest than its name")));
    }
    let config: ImageConfiguration = parse(name, &bytes)?;
    if !is_for_guests(&config) {
        return choose(None, &[], &BTreeSet::from([platform(&config)]));
    }
    image(digest, config, layers.iter().map(|file| (file.clone(), None)).collect())
}

fn image(
    digest: String,
    config: ImageConfiguration,
    files: Vec<(String, Option<String>)>,
) -> Result<ArchivedImage> {
    let contents = config.rootfs().diff_ids();
    let (count, known) = (files.len(), contents.len());
    if count != known || count > MAX_LAYERS {
        let text =
            format!("it has {count} layers; its configuration {known}; at most {MAX_LAYERS}");
        return Err(refused(text));
    }
    let layers = files.into_iter().zip(contents).map(|((file, digest), contents)| {
        Ok(Layer { file, digest, contents: digits(contents)?.to_owned() })
    });
    let layers = layers.collect::<Result<_>>()?;
    Ok(ArchivedImage { digest, config, layers })
}
