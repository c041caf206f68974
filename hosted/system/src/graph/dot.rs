//! Capability graph in Graphviz' DOT language, for other programs and for `dot -Tpdf`.

use super::{Edge, Graph, Kind, Node};
use std::fmt::Write;

const KINDS: [Kind; 7] = [
    Kind::Guest,
    Kind::Program,
    Kind::Channel,
    Kind::Server,
    Kind::Root,
    Kind::Kernel,
    Kind::Device,
];

/// Renders the graph as DOT. Templates are dashed; routine edges are grey.
pub fn render(graph: &Graph, name: &str) -> String {
    let mut text = format!("digraph {} {{\n", quoted(name));
    text += "  rankdir=TB; node [shape=box, style=\"rounded,filled\", fontname=\"sans-serif\"];\n";
    text += "  edge [fontname=\"sans-serif\", fontsize=10];\n";
    for kind in KINDS {
        let nodes: Vec<&Node> = graph.nodes.iter().filter(|node| node.kind == kind).collect();
        for node in &nodes {
            let lines = std::iter::once(&node.title).chain(&node.details);
            let label: Vec<&str> = lines.map(String::as_str).collect();
            let style = if node.template { ", style=\"rounded,filled,dashed\"" } else { "" };
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "  {} [label={}, fillcolor=\"{}\"{style}];",
                quoted(&node.id),
                quoted(&label.join("\n")),
                color(kind),
            );
        }
        // Devices stay next to their owners.
        if kind != Kind::Device && nodes.len() > 1 {
            let ids: Vec<String> = nodes.iter().map(|node| quoted(&node.id)).collect();
            let _ = writeln!(text, "  {{ rank=same; {}; }}", ids.join("; "));
        }
    }
    for edge in &graph.edges {
        let id = |index: usize| quoted(&graph.nodes[index].id);
        let _ = writeln!(text, "  {} -> {} [{}];", id(edge.from), id(edge.to), attributes(edge));
    }
    text + "}\n"
}

fn attributes(edge: &Edge) -> String {
    let mut attributes = format!("label={}", quoted(&edge.label.join("\n")));
    if edge.both {
        attributes += ", dir=both";
    }
    if edge.routine {
        attributes += ", color=\"#999999\", fontcolor=\"#999999\"";
    }
    attributes
}

fn color(kind: Kind) -> &'static str {
    match kind {
        Kind::Guest => "#fdf3e1",
        Kind::Program | Kind::Root => "#dcebf7",
        Kind::Channel => "#efe3f6",
        Kind::Server => "#e2f0d9",
        Kind::Kernel => "#8fbcdb",
        Kind::Device => "#e8e8e8",
    }
}

/// Quotes a DOT string, in which `\n` is a line break.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_and_lines() {
        assert_eq!(quoted("a\"b\\c\nd"), r#""a\"b\\c\nd""#);
    }
}
