//! Layers without an archive around them, and so without a manifest.

use crate::archive::Visited;
use crate::ext4::Writer;
use crate::layer;
use crate::tree::Tree;
use std::fs::File;
use std::io::Result;

/// Longest contents of a layer in bytes, without compression.
const LONGEST: u64 = 1 << 20;

/// Writes the file system of these layers to an empty file and returns its length in bytes.
///
/// # Errors
/// A layer is malformed, refused, or has more than 1 MiB; errors of the file.
pub fn write_layers(layers: &[Vec<u8>], file: &File) -> Result<u64> {
    let digests: Vec<_> = layers
        .iter()
        .map(|layer| layer::digest_of_contents(layer, LONGEST))
        .collect::<Result<_>>()?;
    let mut tree = Tree::new();
    entries(layers, &digests, |place, visited| tree.add(visited.entry, place.0, place.1))?;
    let mut writer = Writer::new(&tree, file)?;
    writer.write_metadata([1; 16])?;
    entries(layers, &digests, |place, visited| writer.write_data(place, visited.data))?;
    writer.finish()?;
    Ok(file.metadata()?.len())
}

/// Calls `visit` with each entry, after the numbers of its layer and of the entry there.
fn entries(
    layers: &[Vec<u8>],
    digests: &[String],
    mut visit: impl FnMut((usize, usize), Visited<'_>) -> Result<()>,
) -> Result<()> {
    let mut bytes = 0;
    for (number, (layer, digest)) in layers.iter().zip(digests).enumerate() {
        let mut index = 0;
        layer::entries(&layer[..], None, digest, &mut bytes, |visited| {
            index += 1;
            visit((number, index), visited)
        })?;
    }
    Ok(())
}
