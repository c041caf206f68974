//! Structures of ext4 as bytes (Linux' `Documentation/filesystems/ext4`, `fs/ext4/ext4.h`,
//! `fs/ext4/xattr.h`).

use crate::archive::{Attributes, refused};
use crate::tree::NodeKind;
use std::collections::BTreeMap;
use std::io::Result;

/// Bytes of a block, an inode, a group descriptor.
pub const BLOCK: usize = 4096;
pub const INODE: usize = 256;
pub const GROUP_DESCRIPTOR: usize = 32;
/// Blocks of a group: as many as its bitmap has bits.
pub const BLOCKS_PER_GROUP: u32 = 8 * BLOCK as u32;
/// Inode of the root, and first one that is not reserved.
pub const ROOT_INODE: u32 = 2;
pub const FIRST_INODE: u32 = 11;
/// Most names of a file.
pub const MAX_LINKS: u32 = 65_000;
/// Longest target of a symbolic link within its inode.
pub const SHORT_LINK: usize = 59;

/// Place of the superblock in the first block.
const SUPERBLOCK: usize = 1024;
const MAGIC: u16 = 0xef53;
/// Features: extended attributes, backups of the superblock in stated groups (none).
const COMPATIBLE: u32 = 0x8 | 0x200;
/// Types in directories, extents, metadata of groups at any place.
const INCOMPATIBLE: u32 = 0x2 | 0x40 | 0x200;
/// Large files, directories with any number of directories, inodes of 256 bytes.
const READ_ONLY_COMPATIBLE: u32 = 0x2 | 0x20 | 0x40;
/// Groups whose metadata is together, as a power of two.
const GROUPS_PER_FLEX: u8 = 4;
/// Bytes of an inode after the first 128 that have a meaning.
const EXTRA: u16 = 32;

/// Numbers of a file system.
pub struct Geometry {
    pub blocks: u32,
    pub free_blocks: u32,
    pub inodes: u32,
    pub free_inodes: u32,
    pub inodes_per_group: u32,
    pub uuid: [u8; 16],
}

fn set(bytes: &mut [u8], place: usize, value: &[u8]) {
    bytes[place..place + value.len()].copy_from_slice(value);
}

fn set16(bytes: &mut [u8], place: usize, value: u16) {
    set(bytes, place, &value.to_le_bytes());
}

fn set32(bytes: &mut [u8], place: usize, value: u32) {
    set(bytes, place, &value.to_le_bytes());
}

/// Returns the first block.
pub fn superblock(geometry: &Geometry) -> Vec<u8> {
    const CLEAN: u16 = 1;
    const CONTINUE: u16 = 1;
    // Blocks of 1024 << 2 bytes.
    const LOG_BLOCK: u32 = 2;
    const DYNAMIC: u32 = 1;
    let mut block = vec![0; BLOCK];
    let own = &mut block[SUPERBLOCK..];
    let words = [
        (0x0, geometry.inodes),
        (0x4, geometry.blocks),
        (0xc, geometry.free_blocks),
        (0x10, geometry.free_inodes),
        (0x18, LOG_BLOCK),
        (0x1c, LOG_BLOCK),
        (0x20, BLOCKS_PER_GROUP),
        (0x24, BLOCKS_PER_GROUP),
        (0x28, geometry.inodes_per_group),
        (0x4c, DYNAMIC),
        (0x54, FIRST_INODE),
        (0x5c, COMPATIBLE),
        (0x60, INCOMPATIBLE),
        (0x64, READ_ONLY_COMPATIBLE),
    ];
    words.into_iter().for_each(|(place, value)| set32(own, place, value));
    let halves = [
        // No check after a number of mounts.
        (0x36, u16::MAX),
        (0x38, MAGIC),
        (0x3a, CLEAN),
        (0x3c, CONTINUE),
        (0x58, INODE as u16),
        (0x15c, EXTRA),
        (0x15e, EXTRA),
    ];
    halves.into_iter().for_each(|(place, value)| set16(own, place, value));
    set(own, 0x68, &geometry.uuid);
    set(own, 0x174, &[GROUPS_PER_FLEX]);
    block
}

/// Group of blocks and inodes.
pub struct BlockGroup {
    pub block_bitmap: u32,
    pub inode_bitmap: u32,
    pub inode_table: u32,
    pub free_blocks: u32,
    pub free_inodes: u32,
    pub directories: u32,
}

impl BlockGroup {
    /// Returns its descriptor.
    pub fn descriptor(&self) -> [u8; GROUP_DESCRIPTOR] {
        let mut bytes = [0; GROUP_DESCRIPTOR];
        set32(&mut bytes, 0x0, self.block_bitmap);
        set32(&mut bytes, 0x4, self.inode_bitmap);
        set32(&mut bytes, 0x8, self.inode_table);
        // A group has at most 32768 of each.
        set16(&mut bytes, 0xc, self.free_blocks as u16);
        set16(&mut bytes, 0xe, self.free_inodes as u16);
        set16(&mut bytes, 0x10, self.directories as u16);
        bytes
    }
}

/// Returns a bitmap whose first `used` of `count` bits are set, and those after them, which do not
/// exist.
pub fn bitmap(used: u32, count: u32) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK];
    for bit in (0..used).chain(count..BLOCKS_PER_GROUP) {
        bytes[bit as usize / 8] |= 1 << (bit % 8);
    }
    bytes
}

/// Returns the type of a node in a directory.
pub fn file_type(kind: &NodeKind) -> u8 {
    match kind {
        NodeKind::File(..) => 1,
        NodeKind::Folder(_) => 2,
        NodeKind::Fifo => 5,
        NodeKind::Symlink(_) => 7,
    }
}

/// Returns the blocks of a directory with these names, inodes and types.
pub fn directory<'a>(entries: impl Iterator<Item = (&'a [u8], u32, u8)>) -> Vec<u8> {
    const HEADER: usize = 8;
    let mut bytes = Vec::new();
    let mut last = 0;
    for (name, inode, kind) in entries {
        let length = (HEADER + name.len()).next_multiple_of(4);
        let place = bytes.len();
        if place % BLOCK + length > BLOCK {
            extend_last(&mut bytes, last);
        }
        last = bytes.len();
        bytes.extend(inode.to_le_bytes());
        bytes.extend((length as u16).to_le_bytes());
        // Names have at most 255 bytes.
        bytes.extend([name.len() as u8, kind]);
        bytes.extend(name);
        bytes.resize(last + length, 0);
        // An entry that fills its block ends it.
        if bytes.len() % BLOCK == 0 {
            last = bytes.len();
        }
    }
    if bytes.len() % BLOCK != 0 {
        extend_last(&mut bytes, last);
    }
    bytes
}

/// Extends the last entry of a directory to the end of its block.
fn extend_last(bytes: &mut Vec<u8>, last: usize) {
    let end = bytes.len().next_multiple_of(BLOCK);
    bytes.resize(end, 0);
    if last < end {
        set16(bytes, last + 4, (end - last) as u16);
    }
}

/// Blocks of a file, which are in one piece.
pub struct Extents {
    pub start: u32,
    pub count: u32,
    /// Block of the list, if it does not fit into the inode.
    pub block: u32,
}

impl Extents {
    const MAGIC: u16 = 0xf30a;
    /// Most blocks of one extent.
    const MAX: u32 = 0x8000;
    const ENTRY: usize = 12;
    const IN_INODE: u32 = 4;

    /// Returns whether a file with this number of blocks needs a block for its extents.
    pub fn has_block(count: u32) -> bool {
        count.div_ceil(Self::MAX) > Self::IN_INODE
    }

    fn header(entries: u16, most: u16, depth: u16) -> Vec<u8> {
        let words = [Self::MAGIC, entries, most, depth, 0, 0];
        words.into_iter().flat_map(u16::to_le_bytes).collect()
    }

    /// Returns the list of extents, for `most` entries.
    fn list(&self, most: u16) -> Vec<u8> {
        let pieces = self.count.div_ceil(Self::MAX);
        // A file of the longest length has 64.
        let mut bytes = Self::header(pieces as u16, most, 0);
        for piece in 0..pieces {
            let first = piece * Self::MAX;
            let length = (self.count - first).min(Self::MAX);
            bytes.extend(first.to_le_bytes());
            bytes.extend((length as u16).to_le_bytes());
            // Upper bits of the block.
            bytes.extend([0; 2]);
            bytes.extend((self.start + first).to_le_bytes());
        }
        bytes
    }

    /// Returns the block of extents.
    pub fn leaf(&self) -> Vec<u8> {
        self.list((BLOCK / Self::ENTRY - 1) as u16)
    }

    /// Returns the part within the inode.
    fn in_inode(&self) -> Vec<u8> {
        let most = Self::IN_INODE as u16;
        if self.block == 0 {
            return self.list(most);
        }
        let mut bytes = Self::header(1, most, 1);
        // From the first block of the file on.
        bytes.extend([0; 4]);
        bytes.extend(self.block.to_le_bytes());
        bytes.extend([0; 4]);
        bytes
    }
}

/// File, directory or link.
pub struct Inode<'a> {
    pub attributes: &'a Attributes,
    pub kind: &'a NodeKind,
    pub size: u64,
    pub links: u32,
    /// Number of all blocks, those of lists and attributes included.
    pub blocks: u32,
    pub xattrs: u32,
    pub extents: Extents,
}

impl Inode<'_> {
    /// Returns its bytes.
    pub fn bytes(&self) -> [u8; INODE] {
        const EXTENTS: u32 = 0x8_0000;
        /// Sectors of 512 bytes.
        const SECTORS: u32 = BLOCK as u32 / 512;
        let mut bytes = [0; INODE];
        let own = &mut bytes;
        let kind = match self.kind {
            NodeKind::File(..) => 0x8000,
            NodeKind::Folder(_) => 0x4000,
            NodeKind::Symlink(_) => 0xa000,
            NodeKind::Fifo => 0x1000,
        };
        let Attributes { mode, user, group, modified, .. } = self.attributes;
        set16(own, 0x0, kind | mode);
        set16(own, 0x2, *user as u16);
        set32(own, 0x4, self.size as u32);
        for place in [0x8, 0xc, 0x10, 0x90] {
            set32(own, place, *modified as u32);
        }
        // Bits 32 and 33 of the times; the lower 32 bits are signed, so bit 31 carries.
        let upper = ((*modified + (1 << 31)) >> 32) as u32 & 3;
        [0x84, 0x88, 0x8c, 0x94].into_iter().for_each(|place| set32(own, place, upper));
        set16(own, 0x18, *group as u16);
        // More directories than can be counted (`dir_nlink`).
        set16(own, 0x1a, if self.links > MAX_LINKS { 1 } else { self.links as u16 });
        set32(own, 0x1c, self.blocks * SECTORS);
        match self.kind {
            NodeKind::Symlink(target) if target.len() <= SHORT_LINK => set(own, 0x28, target),
            NodeKind::Fifo => {}
            _ => {
                set32(own, 0x20, EXTENTS);
                set(own, 0x28, &self.extents.in_inode());
            }
        }
        set32(own, 0x68, self.xattrs);
        set32(own, 0x6c, (self.size >> 32) as u32);
        set16(own, 0x78, (user >> 16) as u16);
        set16(own, 0x7a, (group >> 16) as u16);
        set16(own, 0x80, EXTRA);
        bytes
    }
}

/// Returns the block of extended attributes; `None`: there are none.
///
/// # Errors
/// They do not fit.
pub fn xattr_block(xattrs: &[(String, Vec<u8>)]) -> Result<Option<Vec<u8>>> {
    const HEADER: usize = 32;
    const ENTRY: usize = 16;
    if xattrs.is_empty() {
        return Ok(None);
    }
    // In the order of the block: kind, length of the name, name.
    let mut named: BTreeMap<(u8, usize, &[u8]), &[u8]> = BTreeMap::new();
    for (name, value) in xattrs {
        let (index, rest) = match (name.strip_prefix("user."), name.strip_prefix("security.")) {
            (Some(rest), _) => (1, rest),
            (_, Some(rest)) => (6, rest),
            _ => return Err(refused(format!("unknown kind of extended attribute {name}"))),
        };
        // A later record replaces an earlier one.
        named.insert((index, rest.len(), rest.as_bytes()), value);
    }
    let size = |(&(_, length, _), value): (&(u8, usize, &[u8]), &&[u8])| {
        ENTRY + length.next_multiple_of(4) + value.len().next_multiple_of(4)
    };
    // Four zeros end the list.
    if HEADER + named.iter().map(size).sum::<usize>() + 4 > BLOCK {
        return Err(refused("the extended attributes of a file do not fit into 4 KiB"));
    }
    let mut block = vec![0; BLOCK];
    let (mut place, mut end, mut all) = (HEADER, BLOCK, 0_u32);
    for ((index, _, name), value) in named {
        end -= value.len().next_multiple_of(4);
        set(&mut block, end, value);
        let hash = xattr_hash(name, &block[end..end + value.len().next_multiple_of(4)]);
        set(&mut block, place, &[name.len() as u8, index]);
        set16(&mut block, place + 2, end as u16);
        set32(&mut block, place + 8, value.len() as u32);
        set32(&mut block, place + 12, hash);
        set(&mut block, place + ENTRY, name);
        place += ENTRY + name.len().next_multiple_of(4);
        all = all.rotate_left(16) ^ hash;
    }
    // Magic number, users of the block, blocks, hash.
    for (place, value) in [(0, 0xea02_0000), (4, 1), (8, 1), (12, all)] {
        set32(&mut block, place, value);
    }
    Ok(Some(block))
}

/// Returns the hash of an attribute; its value is padded to whole words.
fn xattr_hash(name: &[u8], value: &[u8]) -> u32 {
    let hash = name.iter().fold(0_u32, |hash, &byte| hash.rotate_left(5) ^ u32::from(byte));
    let words = value.as_chunks().0.iter().map(|word: &[u8; 4]| u32::from_le_bytes(*word));
    words.fold(hash, |hash, word| hash.rotate_left(16) ^ word)
}
