//! Flattened device tree, version 17 (Devicetree Specification v0.4, chapter 5), as firmware and
//! emulators pass it to kernels. Integers are big-endian.

mod devices;
pub mod pci;

use crate::bytes;

/// First bytes of a device tree.
const MAGIC: u32 = 0xd00d_feed;
/// Length of the header in bytes.
const HEADER: usize = 40;
/// The version that this reader understands, and to which newer ones must be compatible.
const VERSION: u32 = 17;
/// Most nodes inside of each other, the root included.
pub const MAX_DEPTH: usize = 8;
/// Longest device tree in bytes: that of Linux' boot protocol (arm64/booting.rst).
pub const MAX_LENGTH: usize = 2 << 20;

/// Tokens of the structure block.
mod token {
    pub const BEGIN_NODE: u32 = 1;
    pub const END_NODE: u32 = 2;
    pub const PROPERTY: u32 = 3;
    pub const NOP: u32 = 4;
    pub const END: u32 = 9;
}

/// Defect of a device tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdtError {
    /// It does not begin with the magic number.
    BadMagic,
    /// It is incompatible with version 17, or longer than [`MAX_LENGTH`].
    UnsupportedVersion,
    /// A block is not inside, or nodes are not closed, or nested more than [`MAX_DEPTH`] times.
    BadStructure,
}

impl core::fmt::Display for FdtError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::BadMagic => "it does not begin with the magic number",
            Self::UnsupportedVersion => "its version is not supported, or it is too long",
            Self::BadStructure => "its structure is broken",
        })
    }
}

fn u32(from: &[u8], at: usize) -> Option<u32> {
    bytes::array(from, at).map(u32::from_be_bytes)
}

fn u64(from: &[u8], at: usize) -> Option<u64> {
    bytes::array(from, at).map(u64::from_be_bytes)
}

/// A number of `cells` words of 32 bits at the start of a value, and the rest. More than 64 bits
/// are accepted if the upper ones are 0.
fn number(value: &[u8], cells: u32) -> Option<(u64, &[u8])> {
    let (taken, rest) = value.split_at_checked(4 * cells as usize)?;
    let mut number = 0u64;
    for at in (0..taken.len()).step_by(4) {
        number = number.checked_mul(1 << 32)? | u64::from(u32(taken, at)?);
    }
    Some((number, rest))
}

/// A device tree whose structure has been checked.
#[derive(Clone, Copy, Debug)]
pub struct Fdt<'a> {
    structure: &'a [u8],
    strings: &'a [u8],
    reservations: &'a [u8],
}

/// Length of the device tree that begins with these bytes, which are at least 8; `None`: there is
/// none, or it is too long.
pub fn length(head: &[u8]) -> Option<usize> {
    let length = u32(head, 4)? as usize;
    (u32(head, 0)? == MAGIC && (HEADER..=MAX_LENGTH).contains(&length)).then_some(length)
}

enum Token<'a> {
    Begin(&'a [u8]),
    End,
    Property(&'a [u8], &'a [u8]),
    Finish,
}

impl<'a> Fdt<'a> {
    /// Checks the header and the structure of a device tree.
    ///
    /// # Errors
    /// Those of [`FdtError`].
    pub fn parse(all: &'a [u8]) -> Result<Self, FdtError> {
        if u32(all, 0) != Some(MAGIC) {
            return Err(FdtError::BadMagic);
        }
        let field = |at| u32(all, at).map(|value| value as usize);
        let total = length(all).ok_or(FdtError::UnsupportedVersion)?;
        let all = all.get(..total).ok_or(FdtError::BadStructure)?;
        let [version, compatible] = [20, 24].map(|at| u32(all, at).unwrap_or(0));
        if version < VERSION || compatible > VERSION {
            return Err(FdtError::UnsupportedVersion);
        }
        let block = |place, length| bytes::slice(all, field(place)?, field(length)?);
        let fdt = (|| {
            let reservations = all.get(field(16)?..)?;
            Some(Self { structure: block(8, 36)?, strings: block(12, 32)?, reservations })
        })();
        let fdt = fdt.ok_or(FdtError::BadStructure)?;
        fdt.check().ok_or(FdtError::BadStructure)?;
        Ok(fdt)
    }

    /// Reads all tokens once, so that later walks meet no defect: one root node, properties before
    /// nodes.
    fn check(&self) -> Option<()> {
        let (mut at, mut depth, mut may_have_properties) = (0, 0, false);
        loop {
            match self.token(&mut at)? {
                Token::Begin(_) if depth < MAX_DEPTH => {
                    (depth, may_have_properties) = (depth + 1, true)
                }
                Token::End => (depth, may_have_properties) = (usize::checked_sub(depth, 1)?, false),
                Token::Property(..) if may_have_properties => {}
                _ => return None,
            }
            if depth == 0 {
                return matches!(self.token(&mut at)?, Token::Finish).then_some(());
            }
        }
    }

    /// The token at `at`, which becomes the place of the next one.
    fn token(&self, at: &mut usize) -> Option<Token<'a>> {
        loop {
            let kind = u32(self.structure, *at)?;
            *at += 4;
            let token = match kind {
                token::BEGIN_NODE => {
                    let rest = self.structure.get(*at..)?;
                    let name = bytes::until_zero(rest);
                    // The zero at its end.
                    rest.get(name.len())?;
                    *at += (name.len() + 1).next_multiple_of(4);
                    Token::Begin(name)
                }
                token::END_NODE => Token::End,
                token::PROPERTY => {
                    let length = u32(self.structure, *at)? as usize;
                    let name = self.strings.get(u32(self.structure, *at + 4)? as usize..)?;
                    let value = bytes::slice(self.structure, *at + 8, length)?;
                    *at += 8 + length.next_multiple_of(4);
                    Token::Property(bytes::until_zero(name), value)
                }
                token::NOP => continue,
                token::END => Token::Finish,
                _ => return None,
            };
            return Some(token);
        }
    }

    /// Ranges of memory that a kernel must not use: base and length in bytes (section 5.3).
    pub fn reservations(&self) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        let list = self.reservations;
        (0..).step_by(16).map_while(move |at| {
            let range = (u64(list, at)?, u64(list, at + 8)?);
            (range != (0, 0)).then_some(range)
        })
    }

    /// The root node.
    pub fn root(&self) -> Node<'a> {
        let mut at = 0;
        // `check` has found a node there.
        let name = match self.token(&mut at) {
            Some(Token::Begin(name)) => name,
            _ => &[],
        };
        Node { fdt: *self, name, at, depth: 0, buses: [Bus::ROOT; MAX_DEPTH] }
    }

    /// The node with this path, such as `/chosen`. Names match with and without their unit address.
    pub fn node(&self, path: &str) -> Option<Node<'a>> {
        let mut names = path.split('/').filter(|name| !name.is_empty());
        names.try_fold(self.root(), |node, name| node.children().find(|child| child.is_named(name)))
    }

    /// Calls `visit` with each node, before its children.
    pub fn visit(&self, mut visit: impl FnMut(&Node<'a>)) {
        fn all<'a>(node: &Node<'a>, visit: &mut dyn FnMut(&Node<'a>)) {
            visit(node);
            node.children().for_each(|child| all(&child, visit));
        }
        all(&self.root(), &mut visit);
    }
}

/// Address space of a node's children (section 2.3).
#[derive(Clone, Copy, Debug)]
struct Bus<'a> {
    address_cells: u32,
    size_cells: u32,
    /// Translation to the parent's address space; `None`: there is none.
    ranges: Option<&'a [u8]>,
}

impl Bus<'_> {
    /// The values without properties.
    const ROOT: Self = Self { address_cells: 2, size_cells: 1, ranges: None };
    /// Most cells of a number.
    const MAX_CELLS: u32 = 4;
}

/// Node of a device tree.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    fdt: Fdt<'a>,
    /// Name with unit address.
    pub name: &'a [u8],
    /// Place of its contents in the structure block.
    at: usize,
    /// Nodes that contain it.
    depth: usize,
    /// Address space of each of these.
    buses: [Bus<'a>; MAX_DEPTH],
}

impl<'a> Node<'a> {
    /// True for a node with this name, unit address or not.
    pub fn is_named(&self, name: &str) -> bool {
        let name = name.as_bytes();
        self.name.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest[0] == b'@')
    }

    /// Names and values of its properties.
    pub fn properties(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a> {
        let (fdt, mut at) = (self.fdt, self.at);
        core::iter::from_fn(move || match fdt.token(&mut at)? {
            Token::Property(name, value) => Some((name, value)),
            _ => None,
        })
    }

    /// Value of a property.
    pub fn property(&self, name: &str) -> Option<&'a [u8]> {
        self.properties().find_map(|(found, value)| (found == name.as_bytes()).then_some(value))
    }

    /// Value of a property of 32 or 64 bits.
    pub fn number(&self, name: &str) -> Option<u64> {
        let value = self.property(name)?;
        let (number, rest) = number(value, (value.len() / 4) as u32)?;
        (rest.is_empty() && matches!(value.len(), 4 | 8)).then_some(number)
    }

    /// Value of a property that is a text, without the zero at its end.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        core::str::from_utf8(bytes::until_zero(self.property(name)?)).ok()
    }

    /// True if the property `compatible` lists this name.
    pub fn is_compatible(&self, name: &str) -> bool {
        let list = self.property("compatible").unwrap_or(&[]);
        list.split(|&byte| byte == 0).any(|entry| entry == name.as_bytes())
    }

    /// True unless the property `status` says that the device cannot be used.
    pub fn is_enabled(&self) -> bool {
        self.property("status")
            .is_none_or(|status| matches!(bytes::until_zero(status), b"okay" | b"ok"))
    }

    /// Nodes directly inside of it.
    pub fn children(&self) -> impl Iterator<Item = Node<'a>> + use<'a> {
        let cells = |name, default| match self.number(name) {
            Some(cells) if cells <= Bus::MAX_CELLS.into() => cells as u32,
            _ => default,
        };
        let mut buses = self.buses;
        buses[self.depth] = Bus {
            address_cells: cells("#address-cells", Bus::ROOT.address_cells),
            size_cells: cells("#size-cells", Bus::ROOT.size_cells),
            ranges: self.property("ranges"),
        };
        let (fdt, depth, mut at, mut inside) = (self.fdt, self.depth, self.at, 0);
        core::iter::from_fn(move || {
            loop {
                match fdt.token(&mut at)? {
                    Token::Begin(name) => {
                        inside += 1;
                        if inside == 1 {
                            return Some(Node { fdt, name, at, depth: depth + 1, buses });
                        }
                    }
                    Token::End if inside == 0 => return None,
                    Token::End => inside -= 1,
                    Token::Property(..) => {}
                    Token::Finish => return None,
                }
            }
        })
    }

    /// Ranges of physical addresses of the property `reg`: base and length in bytes. Ranges that a
    /// bus does not translate to physical addresses are left out.
    pub fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        let node = *self;
        let buses = node.buses;
        let bus = node.depth.checked_sub(1).map_or(Bus::ROOT, |parent| buses[parent]);
        let mut rest = node.property("reg").unwrap_or(&[]);
        let all = core::iter::from_fn(move || {
            let (base, after) = number(rest, bus.address_cells)?;
            let (length, after) = number(after, bus.size_cells)?;
            let is_progress = after.len() < rest.len();
            rest = after;
            is_progress.then_some((base, length))
        });
        all.filter_map(move |(base, length)| Some((node.physical_of(base, length)?, length)))
    }

    /// Physical address of a range of the address space that contains this node.
    fn physical_of(&self, base: u64, length: u64) -> Option<u64> {
        // The root's children have physical addresses; every other bus translates to its parent's.
        (1..self.depth).rev().try_fold(base, |base, level| {
            translate(&self.buses[level], self.buses[level - 1].address_cells, (base, length))
        })
    }
}

/// Address in the parent's address space, whose addresses have `cells` cells (section 2.3.8).
fn translate(bus: &Bus<'_>, cells: u32, (base, length): (u64, u64)) -> Option<u64> {
    let mut rest = bus.ranges?;
    if rest.is_empty() {
        return Some(base);
    }
    while !rest.is_empty() {
        let (child, after) = number(rest, bus.address_cells)?;
        let (parent, after) = number(after, cells)?;
        let (size, after) = number(after, bus.size_cells)?;
        if let Some(offset) = base.checked_sub(child)
            && offset < size
            && length <= size - offset
        {
            return parent.checked_add(offset);
        }
        if after.len() == rest.len() {
            return None;
        }
        rest = after;
    }
    None
}

#[cfg(test)]
mod tests;
