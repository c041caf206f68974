//! A bar chart as SVG text: groups of bars on a logarithmic axis.

use anyhow::{Context, Result};
use parador_tests::system::workspace;
use std::fmt::Write;
use std::iter::successors;

const COLOURS: [&str; 12] = [
    "#1b6ca8", "#8fb8de", "#e0a458", "#c8553d", "#7a7a7a", "#5a8f5a", "#8a5a8f", "#b5b35c",
    "#3f3f3f", "#4db6ac", "#d48ab0", "#8d6e53",
];
const LEFT: f64 = 250.0;
const WIDTH: f64 = 560.0;
const BAR: f64 = 11.0;
const GAP: f64 = 10.0;
/// Space above the bars with one row of legends.
const HEAD: f64 = 70.0;
/// Legends per row, and the height of a row.
const LEGENDS: usize = 3;
const ROW: f64 = 16.0;
/// Value at the left end of the axis.
const FIRST: f64 = 0.5;
/// Value at the right end of the axis for ratios near native.
pub const NEAR: f64 = 8.0;

/// One group of bars.
pub struct Group {
    /// Label of the group.
    pub title: String,
    /// One value for each legend; `None` leaves the bar out.
    pub values: Vec<Option<f64>>,
}

/// Returns the end of an axis that has all values: a power of two, [`NEAR`] or more.
pub fn end(groups: &[Group]) -> f64 {
    let values = groups.iter().flat_map(|group| group.values.iter().flatten().copied());
    let largest = values.fold(NEAR, f64::max);
    largest.log2().ceil().exp2()
}

/// Draws ratios to native (1 is native speed) on an axis up to `last`, a power of two.
pub fn ratios(title: &str, legends: &[&str], groups: &[Group], last: f64) -> Result<String> {
    let top = HEAD + ROW * ((legends.len() - 1) / LEGENDS) as f64;
    let group_height = BAR * legends.len() as f64 + GAP;
    let bottom = top + group_height * groups.len() as f64;
    let x = |value: f64| {
        let value = value.clamp(FIRST, last);
        LEFT + WIDTH * (value / FIRST).ln() / (last / FIRST).ln()
    };
    let mut out = String::new();
    writeln!(
        out,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {:.0} {:.0}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="12" y="22" font-size="15">{title}</text>"##,
        LEFT + WIDTH + 60.0,
        bottom + 40.0
    )?;
    for (index, legend) in legends.iter().enumerate() {
        let at = 12.0 + 284.0 * (index % LEGENDS) as f64;
        let y = 36.0 + ROW * (index / LEGENDS) as f64;
        let colour = COLOURS[index % COLOURS.len()];
        writeln!(
            out,
            r##"<rect x="{at:.0}" y="{y:.0}" width="12" height="12" fill="{colour}"/><text x="{:.0}" y="{:.0}">{legend}</text>"##,
            at + 17.0,
            y + 10.0
        )?;
    }
    for mark in successors(Some(FIRST), |mark| Some(2.0 * mark)).take_while(|mark| *mark <= last) {
        let at = x(mark);
        let colour = if mark == 1.0 { "#000000" } else { "#dddddd" };
        writeln!(
            out,
            r##"<line x1="{at:.1}" y1="{:.1}" x2="{at:.1}" y2="{bottom:.1}" stroke="{colour}"/><text x="{at:.1}" y="{:.1}" text-anchor="middle">{mark}×</text>"##,
            top - 6.0,
            bottom + 18.0
        )?;
    }
    for (index, group) in groups.iter().enumerate() {
        let y = top + group_height * index as f64;
        writeln!(
            out,
            r##"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"##,
            LEFT - 10.0,
            y + group_height / 2.0,
            group.title
        )?;
        for (bar, value) in group.values.iter().enumerate() {
            let Some(value) = *value else { continue };
            let y = y + BAR * bar as f64;
            let (from, to) = (x(1.0).min(x(value)), x(1.0).max(x(value)));
            writeln!(
                out,
                r##"<rect x="{from:.1}" y="{y:.1}" width="{:.1}" height="{:.1}" fill="{}"/><text x="{:.1}" y="{:.1}" font-size="9">{value:.2}</text>"##,
                (to - from).max(1.0),
                BAR - 1.0,
                COLOURS[bar % COLOURS.len()],
                to + 4.0,
                y + BAR - 2.0
            )?;
        }
    }
    writeln!(out, "</svg>")?;
    Ok(out)
}

/// Writes a drawing to `bench/results`.
pub fn draw(name: &str, text: &str) -> Result<()> {
    let path = workspace().join("bench/results").join(name);
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    println!("drew {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_every_value() {
        let groups = [Group { title: "a".into(), values: vec![Some(1.01), None, Some(20.0)] }];
        let text = ratios("t", &["x", "y", "z"], &groups, NEAR).unwrap();
        assert!(text.starts_with("<svg") && text.ends_with("</svg>\n"));
        assert!(text.contains(">1.01<") && text.contains(">20.00<"));
        assert_eq!((end(&groups), end(&[])), (32.0, NEAR));
    }
}
