//! Compares `docs/spec/sites.md` with the code.

use wedge_sites::{ConstantId, Kind};

const SPEC: &str = include_str!("../../../docs/spec/sites.md");

#[test]
fn kinds_and_constants() {
    let row = |start: &str| SPEC.lines().find(|line| line.starts_with(start)).map(str::to_owned);
    for kind in Kind::ALL {
        let start = format!("| {} | `{}` | ", kind.number(), kind.name());
        assert!(row(&start).is_some(), "{start}");
    }
    assert_eq!(row(&format!("| {} | `", Kind::ALL.len())), None);
    for id in ConstantId::ALL {
        let row = SPEC.lines().find(|line| {
            let number = |value: u64| {
                let (short, long) = (format!("| `{value:#x}` |"), format!("| `{value:#018x}` |"));
                line.contains(&short) || line.contains(&long)
            };
            line.starts_with(&format!("| {} | ", id as u8))
                && number(id.upper_half())
                && number(id.lower_half())
        });
        assert!(row.is_some(), "{id:?}");
    }
}
