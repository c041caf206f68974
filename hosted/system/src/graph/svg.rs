//! Capability graph as an SVG picture.
//!
//! The layers of a system are known, so the layout needs no search: every program is a column with
//! its guest above. Objects of several programs are bars below: servers and `root` across all
//! columns, a channel between its ends. A capability is a vertical line from its holder down to a
//! bar, behind the bars in between. In each column, the lines to the lowest bars are leftmost, so
//! the text at the end of a line has free space. Devices are to the right of their owners.

use super::{Edge, Graph, Kind, Node};
use std::fmt::Write;

/// All lengths are in pixels.
const MARGIN: i32 = 16;
/// Space between columns, and around text.
const SPACE: i32 = 20;
/// Height of a line of text.
const LINE: i32 = 15;
/// Distance of the lines of capabilities.
const SLOT: i32 = 14;
const BAR: i32 = 40;
/// Length and half width of an arrow's head.
const HEAD: (i32, i32) = (8, 4);

const LEGEND: &[&str] = &[
    "An arrow is a capability, from its holder to its object. In addition, each program has its own memory and kernel memory quota, and each VMM the boot files of its guest.",
    "Grey: every program calls root through two gates, log and control; root holds its task, thread and notification, and can revoke every capability.",
    "A guest holds no capability: its VMM acts for it. Dashed: a template, from which root creates virtual machines at run time.",
];

/// Upper bound of text widths in usual sans-serif fonts.
fn width(text: &str, bold: bool) -> i32 {
    let tenths = if bold { 86 } else { 66 };
    text.chars().count() as i32 * tenths / 10
}

fn widest<'a>(lines: impl IntoIterator<Item = &'a String>) -> i32 {
    lines.into_iter().map(|line| width(line, false)).max().unwrap_or(0)
}

/// A program, with its guest above and its capabilities below.
struct Column<'a> {
    program: &'a Node,
    guest: Option<(&'a Node, &'a Edge)>,
    /// From left to right: position, capability.
    slots: Vec<(i32, &'a Edge)>,
    left: i32,
    /// Width of the boxes.
    width: i32,
}

/// An object below the columns.
struct Bar<'a> {
    node: &'a Node,
    index: usize,
    top: i32,
    left: i32,
    right: i32,
    /// Position of its line to `root`.
    slot: i32,
    /// Position of its text.
    text: i32,
}

/// Positions of all parts of a picture.
struct Layout<'a> {
    graph: &'a Graph,
    columns: Vec<Column<'a>>,
    bars: Vec<Bar<'a>>,
    /// Right end of columns and bars.
    right: i32,
    /// Left end of devices.
    devices: i32,
    guest_height: i32,
    /// Top of the programs.
    programs: i32,
    program_height: i32,
    bottom: i32,
}

/// Returns the height of the box of a node.
fn height(node: &Node) -> i32 {
    LINE * (1 + node.details.len() as i32) + SPACE
}

/// Returns the space for this number of lines between two parts.
fn gap(lines: usize) -> i32 {
    LINE * lines as i32 + SPACE
}

fn bar_text(node: &Node) -> String {
    node.details.join(", ")
}

/// Returns the width of the text of a bar, with space.
fn text_width(node: &Node) -> i32 {
    width(&node.title, true) + SPACE + width(&bar_text(node), false) + SPACE
}

/// Returns the objects that are bars, from top to bottom, with their indices.
fn bar_order(graph: &Graph) -> Vec<(usize, &Node)> {
    let nodes = graph.nodes.iter().enumerate();
    let is_bar = |node: &Node| !matches!(node.kind, Kind::Guest | Kind::Program | Kind::Device);
    let mut order: Vec<_> = nodes.filter(|(_, node)| is_bar(node)).collect();
    order.sort_by_key(|(_, node)| node.kind);
    order
}

impl<'a> Layout<'a> {
    fn new(graph: &'a Graph) -> Self {
        let order = bar_order(graph);
        let channels = order.iter().filter(|(_, node)| node.kind == Kind::Channel).count();
        // Lines between bars are left of the text.
        let gutter = SLOT * (order.len() - channels) as i32 + SLOT / 2;
        let depth = |index: usize| order.iter().position(|&(bar, _)| bar == index);

        // From left to right.
        let mut columns: Vec<Column> = Vec::new();
        let mut right = MARGIN;
        for (index, program) in graph.nodes.iter().enumerate() {
            if program.kind == Kind::Program {
                let column = column(graph, index, program, right, depth);
                right = column.right() + SPACE;
                columns.push(column);
            }
        }
        for (_, node) in &order {
            right = right.max(MARGIN + gutter + text_width(node));
        }
        let beyond = graph.edges.iter().filter(|edge| graph.nodes[edge.to].kind == Kind::Device);
        let devices = right + beyond.map(|edge| widest(&edge.label)).max().unwrap_or(0) + 2 * SPACE;

        // From top to bottom.
        let guests = columns.iter().filter_map(|column| column.guest);
        let guest_height = guests.map(|(node, _)| height(node)).max().unwrap_or(0);
        let programs = match guest_height {
            0 => MARGIN + SPACE,
            _ => MARGIN + SPACE + guest_height + gap(2),
        };
        let program_height = columns.iter().map(|column| height(column.program)).max().unwrap_or(0);
        let bottom = programs + program_height;
        let bars = Vec::new();
        let mut layout = Self {
            graph,
            columns,
            bars,
            right,
            devices,
            guest_height,
            programs,
            program_height,
            bottom,
        };
        for (place, &(index, node)) in order.iter().enumerate() {
            let slot = MARGIN + SLOT * (place as i32 - channels as i32) + SLOT / 2;
            layout.add_bar(index, node, slot, MARGIN + gutter);
        }
        layout
    }

    /// Adds a bar at the bottom; `slot` and `text` are the positions in one across all columns.
    fn add_bar(&mut self, index: usize, node: &'a Node, slot: i32, text: i32) {
        let ends = self.graph.edges.iter().filter(|edge| edge.to == index && !edge.routine);
        self.bottom += gap(ends.map(|edge| edge.label.len()).max().unwrap_or(0));
        let top = self.bottom;
        self.bars.push(if node.kind == Kind::Channel {
            let slots = self.columns.iter().flat_map(|column| &column.slots);
            let ends = slots.filter(|(_, edge)| edge.to == index).map(|(x, _)| *x);
            let left = ends.clone().min().unwrap_or(MARGIN) - SLOT / 2;
            let end = ends.max().unwrap_or(MARGIN) + SLOT / 2;
            let right = end.max(left + SLOT + text_width(node));
            Bar { node, index, top, left, right, slot: left, text: left + SLOT }
        } else {
            Bar { node, index, top, left: MARGIN, right: self.right, slot, text }
        });
        self.bottom += BAR;
    }

    fn top_of(&self, index: usize) -> Option<i32> {
        self.bars.iter().find(|bar| bar.index == index).map(|bar| bar.top)
    }

    fn draw_columns(&self, picture: &mut Picture) {
        for column in &self.columns {
            let Column { program, guest, slots, left, width } = column;
            for (x, edge) in slots {
                if let Some(end) = self.top_of(edge.to) {
                    picture.arrow_down(*x, self.programs + self.program_height, end, edge);
                }
            }
            if let Some((guest, edge)) = guest {
                let end = MARGIN + SPACE + self.guest_height;
                picture.boxed(guest, (*left, MARGIN + SPACE), (*width, self.guest_height));
                picture.arrow_up(left + SLOT, self.programs, end, edge);
            }
            picture.boxed(program, (*left, self.programs), (*width, self.program_height));
        }
    }

    /// Draws the lines from bars to bars.
    fn draw_lines(&self, picture: &mut Picture) {
        for bar in &self.bars {
            for edge in self.graph.held_by(bar.index) {
                if let Some(end) = self.top_of(edge.to) {
                    picture.arrow_down(bar.slot, bar.top + BAR, end, edge);
                }
            }
        }
    }

    /// Draws the bars with their devices.
    fn draw_bars(&self, picture: &mut Picture) {
        for bar in &self.bars {
            picture.rectangle(bar.node, (bar.left, bar.top), (bar.right - bar.left, BAR));
            picture.label(bar.text, bar.top + 25, &bar.node.title, "b");
            let after = bar.text + width(&bar.node.title, true) + SPACE;
            picture.label(after, bar.top + 25, &bar_text(bar.node), "n");
            for edge in self.graph.held_by(bar.index) {
                let device = &self.graph.nodes[edge.to];
                if device.kind == Kind::Device {
                    let widest = widest(&device.details).max(width(&device.title, true));
                    let height = LINE * device.details.len() as i32 + BAR;
                    picture.boxed(device, (self.devices, bar.top), (widest + SPACE, height));
                    picture.arrow_right(self.right, self.devices, bar.top, edge);
                    picture.right = picture.right.max(self.devices + widest + SPACE);
                    picture.bottom = picture.bottom.max(bar.top + height);
                }
            }
        }
    }
}

/// Renders the graph as SVG.
pub fn render(graph: &Graph, name: &str) -> String {
    let layout = Layout::new(graph);
    let right = layout.right.max(layout.devices);
    let mut picture = Picture { text: String::new(), right, bottom: layout.bottom };
    picture.label(MARGIN, MARGIN + 4, &format!("Capabilities of {name}"), "b");
    layout.draw_columns(&mut picture);
    // Lines are drawn before the bars, behind them.
    layout.draw_lines(&mut picture);
    layout.draw_bars(&mut picture);
    picture.finish()
}

fn column<'a>(
    graph: &'a Graph,
    index: usize,
    program: &'a Node,
    left: i32,
    depth: impl Fn(usize) -> Option<usize>,
) -> Column<'a> {
    let mut held: Vec<(usize, &Edge)> =
        graph.held_by(index).filter_map(|edge| Some((depth(edge.to)?, edge))).collect();
    held.sort_by_key(|&(depth, edge)| (std::cmp::Reverse(depth), !edge.routine));
    let mut x = left + SLOT;
    let mut slots = Vec::new();
    for (place, &(depth, edge)) in held.iter().enumerate() {
        slots.push((x, edge));
        // A line next to another one to the same bar needs space for its text.
        let same = held.get(place + 1).is_some_and(|&(next, _)| next == depth);
        let text = if edge.routine { 0 } else { widest(&edge.label) + SPACE };
        x += if same { SLOT.max(text) } else { SLOT };
    }
    let guest = graph.held_by(index).find_map(|edge| {
        let node = &graph.nodes[edge.to];
        (node.kind == Kind::Guest).then_some((node, edge))
    });
    let nodes = guest.iter().map(|(node, _)| *node).chain([program]);
    let text = nodes.map(|node| widest(&node.details).max(width(&node.title, true))).max();
    let width = text.unwrap_or(0) + SPACE;
    let last = slots.last().map_or(0, |(x, _)| x - left + SLOT);
    Column { program, guest, slots, left, width: width.max(last) }
}

impl Column<'_> {
    /// Returns the right end of boxes and line labels.
    fn right(&self) -> i32 {
        let beside = self.slots.iter().map(|(x, edge)| match edge.routine {
            true => *x,
            false => x + SLOT / 2 + widest(&edge.label),
        });
        let above = self.guest.iter().map(|(_, edge)| self.left + 2 * SLOT + widest(&edge.label));
        beside.chain(above).chain([self.left + self.width]).max().unwrap_or(self.left)
    }
}

/// SVG under construction.
struct Picture {
    text: String,
    right: i32,
    bottom: i32,
}

impl Picture {
    /// Writing to a string does not fail.
    fn add(&mut self, text: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.text, "{text}");
    }

    /// Draws left-aligned text; `class` is one of those in [`Self::finish`].
    fn label(&mut self, x: i32, y: i32, text: &str, class: &str) {
        let text = text.replace('&', "&amp;").replace('<', "&lt;");
        self.add(format_args!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{text}</text>"));
    }

    fn rectangle(&mut self, node: &Node, (x, y): (i32, i32), (width, height): (i32, i32)) {
        let kind = match node.kind {
            Kind::Guest => "guest",
            Kind::Program | Kind::Root => "program",
            Kind::Channel => "channel",
            Kind::Server => "server",
            Kind::Kernel => "kernel",
            Kind::Device => "device",
        };
        let template = if node.template { " template" } else { "" };
        self.add(format_args!(
            "<rect class=\"{kind}{template}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"5\"/>"
        ));
    }

    /// Draws a rectangle with the node's name and details.
    fn boxed(&mut self, node: &Node, (x, y): (i32, i32), size: (i32, i32)) {
        self.rectangle(node, (x, y), size);
        let lines = 1 + node.details.len() as i32;
        let first = y + (size.1 - LINE * lines) / 2 + 12;
        self.label(x + SPACE / 2, first, &node.title, "b");
        for (line, text) in node.details.iter().enumerate() {
            self.label(x + SPACE / 2, first + LINE * (line as i32 + 1), text, "n");
        }
    }

    fn line(&mut self, from: (i32, i32), to: (i32, i32), edge: &Edge) {
        let class = if edge.routine { "routine" } else { "line" };
        let ((x1, y1), (x2, y2)) = (from, to);
        self.add(format_args!(
            "<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>"
        ));
    }

    /// Draws an arrow head that points down (`direction` 1) or up (-1).
    fn head(&mut self, (x, y): (i32, i32), direction: i32, edge: &Edge) {
        let class = if edge.routine { "routine" } else { "line" };
        let (length, half) = HEAD;
        let base = y - length * direction;
        let (left, right) = (x - half, x + half);
        self.add(format_args!(
            "<path class=\"{class} head\" d=\"M{x} {y}L{left} {base}L{right} {base}z\"/>"
        ));
    }

    /// Draws a label; its last line is slightly above `bottom`.
    fn labels_above(&mut self, x: i32, bottom: i32, edge: &Edge) {
        for (line, text) in edge.label.iter().rev().enumerate() {
            self.label(x, bottom - 9 - LINE * line as i32, text, "e");
        }
    }

    fn arrow_down(&mut self, x: i32, from: i32, to: i32, edge: &Edge) {
        self.line((x, from), (x, to), edge);
        self.head((x, to), 1, edge);
        if edge.both {
            self.head((x, from), -1, edge);
        }
        if !edge.routine {
            self.labels_above(x + SLOT / 2, to, edge);
        }
    }

    fn arrow_up(&mut self, x: i32, from: i32, to: i32, edge: &Edge) {
        self.line((x, from), (x, to), edge);
        self.head((x, to), -1, edge);
        self.labels_above(x + SLOT / 2, from, edge);
    }

    /// Draws an arrow with its label above and below the line, in the middle of a bar's height.
    fn arrow_right(&mut self, from: i32, to: i32, top: i32, edge: &Edge) {
        let y = top + BAR / 2;
        self.line((from, y), (to, y), edge);
        let (length, half) = HEAD;
        let (base, above, below) = (to - length, y - half, y + half);
        self.add(format_args!(
            "<path class=\"line head\" d=\"M{to} {y}L{base} {above}L{base} {below}z\"/>"
        ));
        for (line, text) in edge.label.iter().enumerate() {
            self.label(from + SLOT / 2, y - 6 + (LINE + 5) * line as i32, text, "e");
        }
    }

    fn finish(mut self) -> String {
        let legend = LEGEND.iter().map(|line| width(line, false)).max().unwrap_or(0);
        for (line, text) in LEGEND.iter().enumerate() {
            self.label(MARGIN, self.bottom + SPACE + 12 + LINE * line as i32, text, "e");
        }
        let width = self.right.max(MARGIN + legend) + MARGIN;
        let height = self.bottom + SPACE + LINE * LEGEND.len() as i32 + MARGIN;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             width=\"{width}\" height=\"{height}\">\n\
             <style>\n\
             text {{ font: 12px sans-serif; fill: #222222 }}\n\
             text.b {{ font-weight: bold; font-size: 13px }}\n\
             text.e {{ font-size: 11px; fill: #444444 }}\n\
             rect {{ stroke: #333333; stroke-width: 1.2 }}\n\
             .guest {{ fill: #fdf3e1 }} .program {{ fill: #dcebf7 }} .channel {{ fill: #efe3f6 }}\n\
             .server {{ fill: #e2f0d9 }} \
             .kernel {{ fill: #8fbcdb }} .device {{ fill: #e8e8e8 }}\n\
             .template {{ stroke-dasharray: 5 3 }}\n\
             .line {{ stroke: #1b6ca8; stroke-width: 1.4 }} .line.head {{ fill: #1b6ca8 }}\n\
             .routine {{ stroke: #b0b0b0 }} .routine.head {{ fill: #b0b0b0 }}\n\
             </style>\n\
             <rect width=\"{width}\" height=\"{height}\" style=\"fill:#ffffff;stroke:none\"/>\n\
             {}</svg>\n",
            self.text
        )
    }
}
