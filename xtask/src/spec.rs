//! The specification of the system-call interface, generated from `abi`.
//!
//! Operations come from `abi::OPERATIONS`; the tables of kinds, rights, status values and the
//! state page come from the text of `abi`, because only that has the descriptions.

use crate::process::workspace;
use crate::rules::compare_or_write;
use crate::source;
use anyhow::{Context, Result, anyhow, bail};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use syn::{Attribute, Expr, Fields, Item, ItemEnum, ItemMod, ItemStruct, Lit, Meta, Type};

const PATH: &str = "docs/spec/system-calls.md";

/// `cargo xtask spec [--write]`.
pub fn spec(arguments: &[String]) -> Result<()> {
    compare_or_write("spec", Path::new(PATH), &generate()?, arguments)
}

fn generate() -> Result<String> {
    let interface = parse("abi/src/lib.rs")?;
    let boot = parse("abi/src/boot.rs")?;
    let mut out = String::new();
    writeln!(out, "# System calls\n")?;
    writeln!(out, "Generated from `abi` by `cargo xtask spec --write`. Do not edit.\n")?;
    writeln!(out, "Interface version {}.\n", abi::ABI_VERSION)?;
    let head = documentation(&interface.attrs);
    let convention = head.find("# Register convention").context("abi: no register convention")?;
    writeln!(
        out,
        "{}\n",
        head[convention..]
            .replace("# Register", "## Register")
            .replace("[`Op`]", "operation")
            .replace("[`Status`]", "status")
    )?;

    operations(&mut out)?;
    for (title, name) in [
        ("Status values", "Status"),
        ("Kinds of object", "Kind"),
        ("Kinds of delegation item", "ItemKind"),
    ] {
        enumeration(&mut out, title, find_enum(&interface, name)?)?;
    }
    for item in &interface.items {
        if let Item::Enum(item) = item
            && !["Status", "Kind", "ItemKind"].contains(&item.ident.to_string().as_str())
        {
            enumeration(&mut out, &format!("`{}`", item.ident), item)?;
        }
    }
    constants(&mut out, "Modes of a VM", find_module(&interface, "vm_mode")?)?;
    constants(&mut out, "Rights", find_module(&interface, "rights")?)?;
    constants(&mut out, "First capabilities of root", find_module(&boot, "slot")?)?;
    virtual_cpu(&mut out)?;
    structure(&mut out, "Boot page", find_struct(&boot, "BootInfo")?)?;
    Ok(out.trim_end().to_owned() + "\n")
}

fn operations(out: &mut String) -> Result<()> {
    writeln!(out, "## Operations\n")?;
    for operation in abi::OPERATIONS {
        writeln!(out, "### {} `{}`\n", operation.code, operation.name)?;
        writeln!(out, "- in: {}", or_none(operation.args))?;
        writeln!(out, "- out: {}\n", or_none(operation.results))?;
        let text = operation.text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
        let text = text.replace("[`crate::vm_mode`]", "modes of a VM, below");
        writeln!(out, "{}\n", text.trim())?;
    }
    Ok(())
}

fn virtual_cpu(out: &mut String) -> Result<()> {
    let vcpu = parse("abi/src/vcpu.rs")?;
    writeln!(out, "## Virtual CPU\n")?;
    writeln!(out, "{}\n", documentation(&vcpu.attrs))?;
    constants(out, "Exit reasons", find_module(&vcpu, "exit")?)?;
    constants(out, "Information of memory faults", find_module(&vcpu, "memory_fault")?)?;
    structure(out, "`RunControl`", find_struct(&vcpu, "RunControl")?)?;
    let x86 = [
        ("State groups", "group"),
        ("Exit reasons of x86-64", "exit"),
        ("Information of port accesses", "port"),
        ("Information of control-register accesses", "control_register"),
        ("Interrupt windows", "window"),
        ("Events to inject", "event"),
        ("Access rights of segments", "access_rights"),
        ("Optimisations of the vTLB", "vtlb"),
        ("Counters of the vTLB", "vtlb_counter"),
    ];
    virtual_cpu_of(out, "x86-64", "abi/src/vcpu/x86.rs", &x86)?;
    let arm64 = [
        ("State groups", "group"),
        ("Exit reasons of AArch64", "exit"),
        ("Virtual interrupts", "virq"),
        ("Registers of EL1", "system"),
    ];
    virtual_cpu_of(out, "AArch64", "abi/src/vcpu/arm64.rs", &arm64)
}

/// The part of an architecture: tables of these modules of its file, by title, and its state page.
fn virtual_cpu_of(
    out: &mut String,
    architecture: &str,
    path: &str,
    modules: &[(&str, &str)],
) -> Result<()> {
    let file = parse(path)?;
    writeln!(out, "## Virtual CPU on {architecture}\n")?;
    writeln!(out, "{}\n", documentation(&file.attrs))?;
    for (title, module) in modules {
        constants(out, title, find_module(&file, module)?)?;
    }
    structure(out, "State page", find_struct(&file, "VcpuState")?)
}

fn or_none(text: &str) -> String {
    if text.is_empty() { "nothing".to_owned() } else { format!("`{text}`") }
}

fn parse(path: &str) -> Result<syn::File> {
    let text = source::read(&workspace().join(path))?;
    syn::parse_file(&text).map_err(|error| anyhow!("{path}: {error}"))
}

/// The text of documentation comments, links written as plain names.
fn documentation(attributes: &[Attribute]) -> String {
    let mut lines = Vec::new();
    for attribute in attributes {
        if let Meta::NameValue(pair) = &attribute.meta
            && pair.path.is_ident("doc")
            && let Expr::Lit(literal) = &pair.value
            && let Lit::Str(text) = &literal.lit
        {
            let line = text.value();
            lines.push(line.strip_prefix(' ').unwrap_or(&line).trim_end().to_owned());
        }
    }
    lines.join("\n")
}

/// Documentation as one cell of a table.
fn cell(attributes: &[Attribute]) -> String {
    documentation(attributes)
        .replace('\n', " ")
        .replace("[`super::", "[`")
        .replace("[`crate::", "[`")
        .replace("[`", "`")
        .replace("`]", "`")
        .replace('|', "\\|")
}

fn find_enum<'a>(file: &'a syn::File, name: &str) -> Result<&'a ItemEnum> {
    file.items
        .iter()
        .find_map(|item| match item {
            Item::Enum(item) if item.ident == name => Some(item),
            _ => None,
        })
        .with_context(|| format!("abi has no enum {name}"))
}

fn find_module<'a>(file: &'a syn::File, name: &str) -> Result<&'a ItemMod> {
    file.items
        .iter()
        .find_map(|item| match item {
            Item::Mod(item) if item.ident == name => Some(item),
            _ => None,
        })
        .with_context(|| format!("abi has no module {name}"))
}

fn find_struct<'a>(file: &'a syn::File, name: &str) -> Result<&'a ItemStruct> {
    file.items
        .iter()
        .find_map(|item| match item {
            Item::Struct(item) if item.ident == name => Some(item),
            _ => None,
        })
        .with_context(|| format!("abi has no struct {name}"))
}

fn enumeration(out: &mut String, title: &str, item: &ItemEnum) -> Result<()> {
    writeln!(
        out,
        "## {title}\n\n{}\n\n| value | name | meaning |\n|---|---|---|",
        cell(&item.attrs)
    )?;
    for variant in &item.variants {
        let (_, value) = variant
            .discriminant
            .as_ref()
            .with_context(|| format!("{} has no value in abi", variant.ident))?;
        writeln!(
            out,
            "| {} | `{}` | {} |",
            evaluate(value, &Known::new())?,
            variant.ident,
            cell(&variant.attrs)
        )?;
    }
    writeln!(out)?;
    Ok(())
}

fn constants(out: &mut String, title: &str, module: &ItemMod) -> Result<()> {
    let text = cell(&module.attrs);
    writeln!(out, "## {title}\n\n{text}\n\n| value | name | meaning |\n|---|---|---|")?;
    let (_, items) = module.content.as_ref().context("abi: module in another file")?;
    let mut known = Known::new();
    for item in items {
        if let Item::Const(item) = item {
            let value = evaluate(&item.expr, &known)?;
            known.insert(item.ident.to_string(), value);
            writeln!(out, "| {value:#x} | `{}` | {} |", item.ident, cell(&item.attrs))?;
        }
    }
    writeln!(out)?;
    Ok(())
}

/// Fields with offsets by the rules of `repr(C)`.
fn structure(out: &mut String, title: &str, item: &ItemStruct) -> Result<()> {
    let text = cell(&item.attrs);
    writeln!(
        out,
        "## {title}\n\n{text}\n\n| offset | bytes | field | meaning |\n|---|---|---|---|"
    )?;
    let Fields::Named(fields) = &item.fields else { bail!("{} has no named fields", item.ident) };
    let mut offset = 0;
    for field in &fields.named {
        let (size, align) = layout(&field.ty)?;
        offset = usize::next_multiple_of(offset, align);
        let name = field.ident.as_ref().map(ToString::to_string).unwrap_or_default();
        writeln!(out, "| {offset:#x} | {size} | `{name}` | {} |", cell(&field.attrs))?;
        offset += size;
    }
    writeln!(out)?;
    Ok(())
}

/// Size and alignment of the types that stand in the shared pages.
fn layout(ty: &Type) -> Result<(usize, usize)> {
    match ty {
        Type::Path(path) => {
            let name = path.path.segments.last().map(|part| part.ident.to_string());
            Ok(match name.as_deref() {
                Some("u8" | "SharedU8") => (1, 1),
                Some("u16") => (2, 2),
                Some("u32") => (4, 4),
                Some("u64" | "SharedU64") => (8, 8),
                Some("Segment" | "SharedSegment") => (size_of::<abi::vcpu::x86::Segment>(), 8),
                Some("RunControl") => (size_of::<abi::vcpu::RunControl>(), 8),
                Some("Region") => (size_of::<abi::boot::Region>(), 8),
                other => bail!("abi: unknown size of {other:?}"),
            })
        }
        Type::Array(array) => {
            let (size, align) = layout(&array.elem)?;
            Ok((size * evaluate(&array.len, &Known::new())? as usize, align))
        }
        _ => bail!("abi: a field of an unexpected type"),
    }
}

/// Values of the constants that precede an expression in its module.
type Known = BTreeMap<String, u64>;

/// Lengths of arrays in state pages, by module and name.
const LENGTHS: [([&str; 2], usize); 3] = [
    (["vtlb_counter", "COUNT"], abi::vcpu::x86::vtlb_counter::COUNT),
    (["system", "COUNT"], abi::vcpu::arm64::system::COUNT),
    (["virq", "COUNT"], abi::vcpu::arm64::virq::COUNT),
];

/// Value of a path in [`LENGTHS`].
fn length(path: &syn::Path) -> Option<u64> {
    let is_path = |name: &[&str; 2]| {
        path.segments.iter().map(|part| part.ident.to_string()).eq(name.iter().copied())
    };
    LENGTHS.iter().find(|(name, _)| is_path(name)).map(|&(_, length)| length as u64)
}

/// The value of a constant expression, of the forms that stand in `abi`.
fn evaluate(expression: &Expr, known: &Known) -> Result<u64> {
    use syn::BinOp;
    Ok(match expression {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Int(number) => number.base10_parse()?,
            _ => bail!("abi: a constant that is no number"),
        },
        Expr::Binary(binary) => {
            let left = evaluate(&binary.left, known)?;
            let right = evaluate(&binary.right, known)?;
            match binary.op {
                BinOp::Shl(_) => left << right,
                BinOp::BitOr(_) => left | right,
                BinOp::Add(_) => left + right,
                BinOp::Mul(_) => left * right,
                _ => bail!("abi: an unexpected operator in a constant"),
            }
        }
        Expr::Path(path) if path.path.is_ident("MAX_REGIONS") => abi::boot::MAX_REGIONS as u64,
        Expr::Path(path) if path.path.is_ident("FIRST_OF_ARCH") => abi::vcpu::exit::FIRST_OF_ARCH,
        Expr::Path(path) => {
            let name = path.path.get_ident().map(ToString::to_string).unwrap_or_default();
            let value = known.get(&name).copied().or_else(|| length(&path.path));
            value.with_context(|| format!("abi: unknown constant {name:?}"))?
        }
        _ => bail!("abi: an unexpected form of constant"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_those_of_the_compiler() {
        let text = generate().unwrap();
        let row = |offset: usize, name: &str| {
            let line = text
                .lines()
                .find(|line| line.contains(&format!("| `{name}` |")) && line.starts_with("| 0x"))
                .unwrap_or_default();
            assert!(line.starts_with(&format!("| {offset:#x} |")), "{name}: {line}");
        };
        row(core::mem::offset_of!(abi::vcpu::x86::VcpuState, bytes), "bytes");
        row(core::mem::offset_of!(abi::vcpu::x86::VcpuState, segments), "segments");
        row(core::mem::offset_of!(abi::vcpu::x86::VcpuState, xmm), "xmm");
        row(core::mem::offset_of!(abi::vcpu::RunControl, handled_in_kernel), "handled_in_kernel");
        row(core::mem::offset_of!(abi::boot::BootInfo, regions), "regions");
    }
}
