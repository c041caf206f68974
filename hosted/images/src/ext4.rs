//! Writer of a read-only ext4 file system (Linux' `Documentation/filesystems/ext4`).
//!
//! All sizes are known before the first write, so that the image has a simple form: metadata of all
//! groups first (`flex_bg`), then each file in one piece, and free blocks at the end, which the
//! sparse file does not have. There is no journal, and no backup of the superblock
//! (`sparse_super2`).

use crate::archive::refused;
use crate::tree::{DataPlace, NodeId, NodeKind, ROOT, Tree};
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Result};
use std::os::unix::fs::FileExt;

mod format;

use format::{
    BLOCK, BLOCKS_PER_GROUP, BlockGroup, Extents, FIRST_INODE, GROUP_DESCRIPTOR, INODE, Inode,
    MAX_LINKS, ROOT_INODE, SHORT_LINK, directory, superblock, xattr_block,
};

/// Bytes that are copied at once.
const PIECE: usize = 64 << 10;

/// Blocks of a node.
#[derive(Clone, Copy, Default)]
struct Blocks {
    /// First block of its data, and their number.
    start: u32,
    count: u32,
    /// Block of its list of extents, and of its extended attributes; 0: none.
    extents: u32,
    xattrs: u32,
}

/// File system that is being written.
pub struct Writer<'a> {
    tree: &'a Tree,
    file: &'a File,
    /// By node: its inode (0: it is in no directory), number of names, parent of a directory.
    inodes: Vec<u32>,
    links: Vec<u32>,
    parents: Vec<NodeId>,
    blocks: Vec<Blocks>,
    /// Nodes by inode, from [`FIRST_INODE`] on.
    order: Vec<NodeId>,
    groups: u32,
    inodes_per_group: u32,
    /// Blocks in use, from the first on.
    used: u32,
    /// Files whose data is still to be written.
    pending: HashMap<DataPlace, NodeId>,
}

impl<'a> Writer<'a> {
    /// Lays out the file system of a tree in an empty file.
    ///
    /// # Errors
    /// A file has more names or attributes than the format allows.
    pub fn new(tree: &'a Tree, file: &'a File) -> Result<Self> {
        let count = tree.len();
        let mut writer = Self {
            tree,
            file,
            inodes: vec![0; count],
            links: vec![0; count],
            parents: vec![ROOT; count],
            blocks: vec![Blocks::default(); count],
            order: Vec::new(),
            groups: 1,
            inodes_per_group: 0,
            used: 0,
            pending: HashMap::new(),
        };
        writer.number();
        writer.allocate()?;
        Ok(writer)
    }

    /// Returns the space that the file system occupies on the host, at most, in bytes.
    pub fn bytes(&self) -> u64 {
        u64::from(self.used) * BLOCK as u64
    }

    /// Gives each node that is in a directory its inode, and counts its names.
    fn number(&mut self) {
        self.inodes[ROOT] = ROOT_INODE;
        self.links[ROOT] = 2;
        let mut folders = vec![ROOT];
        while let Some(folder) = folders.pop() {
            let NodeKind::Folder(children) = &self.tree.node(folder).kind else { continue };
            for child in children.values().map(|child| child.node) {
                let is_folder = matches!(self.tree.node(child).kind, NodeKind::Folder(_));
                self.links[child] += 1;
                if self.inodes[child] == 0 {
                    self.inodes[child] = FIRST_INODE + self.order.len() as u32;
                    self.order.push(child);
                }
                if is_folder {
                    self.links[child] += 1;
                    self.links[folder] += 1;
                    self.parents[child] = folder;
                    folders.push(child);
                }
            }
        }
    }

    /// Returns all nodes that have inodes.
    fn nodes(&self) -> impl Iterator<Item = NodeId> + use<> {
        let order = self.order.clone();
        std::iter::once(ROOT).chain(order)
    }

    /// Gives each node its blocks.
    fn allocate(&mut self) -> Result<()> {
        let mut next = 0;
        let mut take = |count: u32| {
            next += count;
            next - count
        };
        for node in self.nodes() {
            let found = self.tree.node(node);
            let count = match &found.kind {
                NodeKind::Folder(_) => self.directory(node).len().div_ceil(BLOCK) as u32,
                NodeKind::File(size, place) => {
                    if *size != 0 {
                        self.pending.insert(*place, node);
                    }
                    size.div_ceil(BLOCK as u64) as u32
                }
                NodeKind::Symlink(target) => u32::from(target.len() > SHORT_LINK),
                NodeKind::Fifo => 0,
            };
            let is_folder = matches!(found.kind, NodeKind::Folder(_));
            if self.links[node] > MAX_LINKS && !is_folder {
                return Err(refused(format!("a file has more than {MAX_LINKS} names")));
            }
            // Fails before anything is written if they are too long.
            let has_xattrs = xattr_block(&found.attributes.xattrs)?.is_some();
            self.blocks[node] = Blocks {
                start: take(count),
                count,
                extents: if Extents::has_block(count) { take(1) } else { 0 },
                xattrs: if has_xattrs { take(1) } else { 0 },
            };
        }
        let inodes = FIRST_INODE - 1 + self.order.len() as u32;
        let metadata = loop {
            let per_group = inodes.div_ceil(self.groups);
            self.inodes_per_group = per_group.next_multiple_of((BLOCK / INODE) as u32);
            let metadata = self.metadata();
            let has_room = metadata + next <= self.groups * BLOCKS_PER_GROUP;
            if has_room && self.inodes_per_group <= BLOCKS_PER_GROUP {
                break metadata;
            }
            self.groups += 1;
        };
        // Data comes after the metadata.
        for blocks in &mut self.blocks {
            blocks.start += metadata;
            let later = [&mut blocks.extents, &mut blocks.xattrs];
            later.into_iter().filter(|block| **block != 0).for_each(|block| *block += metadata);
        }
        self.used = metadata + next;
        Ok(())
    }

    /// Returns the number of blocks of the group descriptors, of one inode table, and of all
    /// metadata: those, the superblock and two bitmaps for each group.
    fn metadata(&self) -> u32 {
        1 + self.descriptors() + self.groups * (2 + self.table())
    }

    fn descriptors(&self) -> u32 {
        (self.groups * GROUP_DESCRIPTOR as u32).div_ceil(BLOCK as u32)
    }

    fn table(&self) -> u32 {
        self.inodes_per_group * INODE as u32 / BLOCK as u32
    }

    /// Returns the contents of a directory.
    fn directory(&self, node: NodeId) -> Vec<u8> {
        let NodeKind::Folder(children) = &self.tree.node(node).kind else { return Vec::new() };
        let own = [(&b"."[..], node), (b"..", self.parents[node])];
        let children = children.iter().map(|(name, child)| (&name[..], child.node));
        let entries = own.into_iter().chain(children);
        directory(entries.map(|(name, node)| {
            (name, self.inodes[node], format::file_type(&self.tree.node(node).kind))
        }))
    }

    fn put(&self, block: u32, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, u64::from(block) * BLOCK as u64)
    }

    /// Writes everything but the data of files. `uuid` identifies the file system.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_metadata(&self, uuid: [u8; 16]) -> Result<()> {
        let total = self.groups * BLOCKS_PER_GROUP;
        self.file.set_len(u64::from(total) * BLOCK as u64)?;
        let used_inodes = FIRST_INODE - 1 + self.order.len() as u32;
        let all_inodes = self.groups * self.inodes_per_group;
        let superblock = superblock(&format::Geometry {
            blocks: total,
            free_blocks: total - self.used,
            inodes: all_inodes,
            free_inodes: all_inodes - used_inodes,
            inodes_per_group: self.inodes_per_group,
            uuid,
        });
        self.put(0, &superblock)?;
        let bitmaps = 1 + self.descriptors();
        let tables = bitmaps + 2 * self.groups;
        let mut descriptors = Vec::new();
        for group in 0..self.groups {
            let count_in = |all: u32, each: u32| all.saturating_sub(group * each).min(each);
            let blocks = count_in(self.used, BLOCKS_PER_GROUP);
            let inodes = count_in(used_inodes, self.inodes_per_group);
            let (table, directories) = self.inode_table(group)?;
            let place = BlockGroup {
                block_bitmap: bitmaps + group,
                inode_bitmap: bitmaps + self.groups + group,
                inode_table: tables + group * self.table(),
                free_blocks: BLOCKS_PER_GROUP - blocks,
                free_inodes: self.inodes_per_group - inodes,
                directories,
            };
            self.put(place.block_bitmap, &format::bitmap(blocks, BLOCKS_PER_GROUP))?;
            self.put(place.inode_bitmap, &format::bitmap(inodes, self.inodes_per_group))?;
            self.put(place.inode_table, &table)?;
            descriptors.extend(place.descriptor());
        }
        self.put(1, &descriptors)?;
        self.nodes().try_for_each(|node| self.write_node(node))
    }

    /// Returns the inode table of a group, and the number of directories in it.
    fn inode_table(&self, group: u32) -> Result<(Vec<u8>, u32)> {
        let mut table = vec![0; self.inodes_per_group as usize * INODE];
        let mut directories = 0;
        // Inodes count from 1.
        let first = group * self.inodes_per_group + 1;
        let nodes = (first..).zip(table.chunks_exact_mut(INODE));
        for (inode, room) in nodes {
            let node = match inode.checked_sub(FIRST_INODE) {
                Some(index) => self.order.get(index as usize).copied(),
                None => (inode == ROOT_INODE).then_some(ROOT),
            };
            let Some(node) = node else { continue };
            room.copy_from_slice(&self.inode(node));
            directories += u32::from(matches!(self.tree.node(node).kind, NodeKind::Folder(_)));
        }
        Ok((table, directories))
    }

    fn inode(&self, node: NodeId) -> [u8; INODE] {
        let found = self.tree.node(node);
        let blocks = self.blocks[node];
        let size = match &found.kind {
            NodeKind::Folder(_) => u64::from(blocks.count) * BLOCK as u64,
            NodeKind::File(size, _) => *size,
            NodeKind::Symlink(target) => target.len() as u64,
            NodeKind::Fifo => 0,
        };
        let of_xattrs = u32::from(blocks.xattrs != 0);
        let of_extents = u32::from(blocks.extents != 0);
        Inode {
            attributes: &found.attributes,
            kind: &found.kind,
            size,
            links: self.links[node],
            blocks: blocks.count + of_xattrs + of_extents,
            xattrs: blocks.xattrs,
            extents: Extents { start: blocks.start, count: blocks.count, block: blocks.extents },
        }
        .bytes()
    }

    /// Writes what a node has besides its inode and the data of a file.
    fn write_node(&self, node: NodeId) -> Result<()> {
        let found = self.tree.node(node);
        let blocks = self.blocks[node];
        match &found.kind {
            NodeKind::Folder(_) => self.put(blocks.start, &self.directory(node))?,
            NodeKind::Symlink(target) if blocks.count != 0 => self.put(blocks.start, target)?,
            _ => {}
        }
        if blocks.extents != 0 {
            let extents = Extents { start: blocks.start, count: blocks.count, block: 0 };
            self.put(blocks.extents, &extents.leaf())?;
        }
        match xattr_block(&found.attributes.xattrs)? {
            Some(bytes) => self.put(blocks.xattrs, &bytes),
            None => Ok(()),
        }
    }

    /// Writes the data of a file, if the tree has it.
    ///
    /// # Errors
    /// The data ends early, or the file cannot be written.
    pub fn write_data(&mut self, place: DataPlace, mut data: impl Read) -> Result<()> {
        let Some(node) = self.pending.remove(&place) else { return Ok(()) };
        let NodeKind::File(size, _) = self.tree.node(node).kind else { return Ok(()) };
        let mut position = u64::from(self.blocks[node].start) * BLOCK as u64;
        let mut left = size;
        let mut piece = vec![0; PIECE];
        while left != 0 {
            let piece = &mut piece[..left.min(PIECE as u64) as usize];
            data.read_exact(piece)?;
            // The file has zeros where nothing was written.
            if piece.iter().any(|byte| *byte != 0) {
                self.file.write_all_at(piece, position)?;
            }
            position += piece.len() as u64;
            left -= piece.len() as u64;
        }
        Ok(())
    }

    /// Checks that all data was written.
    ///
    /// # Errors
    /// It was not.
    pub fn finish(self) -> Result<()> {
        match self.pending.is_empty() {
            true => Ok(()),
            false => Err(refused("the archive has changed while it was read")),
        }
    }
}

#[cfg(test)]
mod tests;
