//! Tree of an image: what its layers make together (OCI Image Format Specification, "Image Layer
//! Filesystem Changeset").
//!
//! Paths go through directories of the image only. A path through a symbolic link is refused, so
//! that no name is ever resolved on the host.

use crate::archive::{ArchiveEntry, Attributes, EntryKind, components, refused};
use crate::limits::{MAX_BYTES, MAX_ENTRIES, MAX_TEXT};
use std::collections::{BTreeMap, HashSet};
use std::io::Result;

/// Prefix of an entry that removes the one with the rest of its name from lower layers.
const WHITEOUT: &[u8] = b".wh.";
/// Rest of the name of an entry that removes all entries of its directory from lower layers.
const OPAQUE: &[u8] = b".wh..opq";
/// Memory of an entry besides its texts, in bytes, for the limit of texts.
const OVERHEAD: usize = 32;

/// Number of a node.
pub type NodeId = usize;
/// Place of a file's data: number of the layer, and number of the entry in it.
pub type DataPlace = (usize, usize);

/// Contents of a node.
#[derive(Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// Directory.
    Folder(BTreeMap<Vec<u8>, Child>),
    /// File: length and place of its data.
    File(u64, DataPlace),
    /// Symbolic link.
    Symlink(Vec<u8>),
    /// Named pipe.
    Fifo,
}

/// Name in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Child {
    /// Its node; files may have several names.
    pub node: NodeId,
    /// Last layer that has this name, or a path through it.
    layer: usize,
}

/// File, directory or link.
#[derive(Debug)]
pub struct Node {
    /// Owner, mode, time.
    pub attributes: Attributes,
    /// Contents.
    pub kind: NodeKind,
}

/// Tree of an image, to which layers are added from the lowest one on.
#[derive(Debug)]
pub struct Tree {
    nodes: Vec<Node>,
    text: usize,
    bytes: u64,
    /// Layer that is being added, and the directories without entries of lower layers, below them
    /// neither: no whiteout of this layer walks them again.
    emptied: (usize, HashSet<NodeId>),
}

/// Node of the root directory.
pub const ROOT: NodeId = 0;

impl Tree {
    /// Creates the tree of an image without layers.
    pub fn new() -> Self {
        Self { nodes: vec![Node::folder()], text: 0, bytes: 0, emptied: (0, HashSet::new()) }
    }

    /// Returns a node.
    pub fn node(&self, node: NodeId) -> &Node {
        &self.nodes[node]
    }

    /// Returns the number of nodes, removed ones included.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Adds an entry of a layer, which is its `index`th.
    ///
    /// # Errors
    /// A limit is exceeded, or the path or link leads out of the directories of the image.
    pub fn add(&mut self, entry: ArchiveEntry, layer: usize, index: usize) -> Result<()> {
        self.count(&entry)?;
        let ArchiveEntry { mut path, kind, attributes } = entry;
        let Some(name) = path.pop() else {
            if kind != EntryKind::Folder {
                return Err(refused("the root of a layer is no directory"));
            }
            self.nodes[ROOT].attributes = attributes;
            return Ok(());
        };
        let parent = self.folder(&path, layer)?;
        if let Some(name) = name.strip_prefix(WHITEOUT) {
            return self.white_out(parent, name, layer);
        }
        let node = match kind {
            EntryKind::Folder => return self.add_folder(parent, name, attributes, layer),
            EntryKind::Hardlink(target) => self.linked(&target)?,
            EntryKind::File(size) => {
                self.push(Node { attributes, kind: NodeKind::File(size, (layer, index)) })
            }
            EntryKind::Symlink(target) => {
                self.push(Node { attributes, kind: NodeKind::Symlink(target) })
            }
            EntryKind::Fifo => self.push(Node { attributes, kind: NodeKind::Fifo }),
        };
        self.children(parent)?.insert(name, Child { node, layer });
        Ok(())
    }

    /// Adds a directory unless there is one: the working directory of an image's command, which
    /// builders leave to whatever starts it. A path that is too long, or leads through a link or
    /// file, is left to the guest, which follows links.
    pub fn add_missing_folder(&mut self, path: &[u8], layer: usize) {
        let slashes = path.iter().take_while(|&&byte| byte == b'/').count();
        if let Ok(path) = components(&path[slashes..]) {
            let _ = self.folder(&path, layer);
        }
    }

    /// Checks the limits.
    fn count(&mut self, entry: &ArchiveEntry) -> Result<()> {
        let target = match &entry.kind {
            EntryKind::Symlink(target) => target.len(),
            EntryKind::File(size) => {
                self.bytes = self.bytes.saturating_add(*size);
                0
            }
            _ => 0,
        };
        let xattrs = entry.attributes.xattrs.iter();
        let xattrs: usize = xattrs.map(|(name, value)| name.len() + value.len() + OVERHEAD).sum();
        // The directories of a path may be new.
        let path: usize = entry.path.iter().map(|name| name.len() + OVERHEAD).sum();
        self.text += path + target + xattrs;
        let over = |limit: &str| Err(refused(format!("the image has more than {limit}")));
        if self.nodes.len() + entry.path.len() > MAX_ENTRIES {
            return over(&format!("{MAX_ENTRIES} files and directories"));
        }
        if self.text > MAX_TEXT {
            return over(&format!("{MAX_TEXT} bytes of names and attributes"));
        }
        if self.bytes > MAX_BYTES {
            return over(&format!("{MAX_BYTES} bytes in files"));
        }
        Ok(())
    }

    fn push(&mut self, node: Node) -> NodeId {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    /// Returns the entries of a directory.
    fn children(&mut self, folder: NodeId) -> Result<&mut BTreeMap<Vec<u8>, Child>> {
        match &mut self.nodes[folder].kind {
            NodeKind::Folder(children) => Ok(children),
            NodeKind::Symlink(_) => Err(refused("a path through a symbolic link")),
            _ => Err(refused("a path through a file")),
        }
    }

    /// Returns the directory with this path; creates it, as archives may leave directories out.
    fn folder(&mut self, path: &[Vec<u8>], layer: usize) -> Result<NodeId> {
        let mut folder = ROOT;
        for name in path {
            folder = match self.children(folder)?.get_mut(name) {
                Some(child) => {
                    child.layer = layer;
                    child.node
                }
                None => {
                    let node = self.push(Node::folder());
                    self.children(folder)?.insert(name.clone(), Child { node, layer });
                    node
                }
            };
        }
        // A file has no entries.
        self.children(folder).map(|_| folder)
    }

    fn add_folder(
        &mut self,
        parent: NodeId,
        name: Vec<u8>,
        attributes: Attributes,
        layer: usize,
    ) -> Result<()> {
        let known = self.children(parent)?.get(&name).map(|child| child.node);
        let known = known.filter(|&node| matches!(self.nodes[node].kind, NodeKind::Folder(_)));
        let node = match known {
            Some(node) => {
                self.nodes[node].attributes = attributes;
                node
            }
            None => self.push(Node { attributes, ..Node::folder() }),
        };
        self.children(parent)?.insert(name, Child { node, layer });
        Ok(())
    }

    /// Returns the target of a hard link.
    fn linked(&mut self, target: &[Vec<u8>]) -> Result<NodeId> {
        let missing = || refused("a hard link to a file that is not in the image");
        let (name, path) = target.split_last().ok_or_else(missing)?;
        let mut folder = ROOT;
        for name in path {
            folder = self.children(folder)?.get(name).ok_or_else(missing)?.node;
        }
        let node = self.children(folder)?.get(name).ok_or_else(missing)?.node;
        match self.nodes[node].kind {
            NodeKind::Folder(_) => Err(refused("a hard link to a directory")),
            _ => Ok(node),
        }
    }

    /// Removes what lower layers have: an entry, or all of the directory.
    fn white_out(&mut self, folder: NodeId, name: &[u8], layer: usize) -> Result<()> {
        if name == OPAQUE {
            self.remove_lower(folder, layer);
            return Ok(());
        }
        match name {
            b"" | b"." | b".." => Err(refused("a whiteout without a name")),
            // Notes of aufs, which have no meaning elsewhere.
            _ if name.starts_with(WHITEOUT) => Ok(()),
            _ => {
                let child = self.children(folder)?.get(name).copied();
                if let Some(child) = child
                    && self.is_lower(child, layer)
                {
                    self.children(folder)?.remove(name);
                }
                Ok(())
            }
        }
    }

    /// Returns whether an entry is of lower layers only; removes what is below it of those.
    fn is_lower(&mut self, child: Child, layer: usize) -> bool {
        self.remove_lower(child.node, layer);
        child.layer < layer
    }

    /// Removes the entries of lower layers from a directory. The depth of paths is limited.
    fn remove_lower(&mut self, folder: NodeId, layer: usize) {
        if self.emptied.0 != layer {
            self.emptied = (layer, HashSet::new());
        }
        let NodeKind::Folder(children) = &mut self.nodes[folder].kind else { return };
        if !self.emptied.1.insert(folder) {
            return;
        }
        let mut children = std::mem::take(children);
        children.retain(|_, child| !self.is_lower(*child, layer));
        self.nodes[folder].kind = NodeKind::Folder(children);
    }
}

impl Node {
    /// Creates a directory that no layer describes.
    fn folder() -> Self {
        let attributes = Attributes { mode: 0o755, ..Attributes::default() };
        Self { attributes, kind: NodeKind::Folder(BTreeMap::new()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(tree: &mut Tree, path: &str, layer: usize) {
        let path = path.split('/').map(|name| name.as_bytes().to_vec()).collect();
        let kind = EntryKind::File(0);
        tree.add(ArchiveEntry { path, kind, attributes: Attributes::default() }, layer, 0).unwrap();
    }

    /// Returns the paths of the files.
    fn files(tree: &Tree, folder: NodeId) -> Vec<String> {
        let NodeKind::Folder(children) = &tree.node(folder).kind else {
            return vec![String::new()];
        };
        let children = children.iter().flat_map(|(name, child)| {
            let name = String::from_utf8_lossy(name).into_owned();
            files(tree, child.node).into_iter().map(move |below| format!("/{name}{below}"))
        });
        children.collect()
    }

    #[test]
    fn whiteouts_remove_lower_layers_only() {
        let mut tree = Tree::new();
        for path in ["a/b/low", "a/low", "c"] {
            add(&mut tree, path, 0);
        }
        for path in ["a/b/up", "a/.wh.b", "a/b/new", "a/.wh.b", ".wh..wh..opq", "a/b/.wh.up"] {
            add(&mut tree, path, 1);
        }
        assert_eq!(files(&tree, ROOT), ["/a/b/new", "/a/b/up"]);
        // Those of the next layer are whiteouts of this one.
        for path in ["a/up", "a/b/.wh.new", "a/.wh..wh..opq"] {
            add(&mut tree, path, 2);
        }
        assert_eq!(files(&tree, ROOT), ["/a/up"]);
    }

    #[test]
    fn many_whiteouts_of_a_directory_walk_it_once() {
        // A walk for each whiteout would take an hour.
        const COUNT: usize = 200_000;
        let mut tree = Tree::new();
        (0..COUNT).for_each(|number| add(&mut tree, &format!("d/e/{number}"), 1));
        for path in [".wh.d", "d/.wh.e", "d/e/.wh..wh..opq"] {
            (0..COUNT).for_each(|_| add(&mut tree, path, 1));
        }
        assert_eq!(files(&tree, ROOT).len(), COUNT);
    }
}
