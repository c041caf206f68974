//! CPU time budgets in a system description, and their admission test.

use hosted_command::problem::Problem;
use proto::system::CpuTime;
use serde::Deserialize;
use serde::de::{self, Deserializer, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;
use toml::Spanned;

/// Shortest budget and longest period of the kernel (`kernel_core::sched`).
const MIN_BUDGET: Duration = Duration::from_micros(20);
const MAX_PERIOD: Duration = Duration::from_secs(10);
/// Unit of the sum of budgets: parts of a CPU.
const PARTS: u64 = 1_000_000;

/// `{ budget = "2ms", period = "10ms" }`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// CPU time per period.
    pub budget: Spanned<String>,
    /// Period, longer than the budget.
    pub period: Spanned<String>,
}

/// `cpu` of a task: `1`, or `{ number = 1, budget = "2ms", period = "10ms" }`.
#[derive(Debug, Default)]
pub struct TaskCpu {
    /// CPU of the first thread.
    pub number: Option<u32>,
    /// CPU time budget.
    pub budget: Option<Budget>,
}

impl<'de> Deserialize<'de> for TaskCpu {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TaskCpuVisitor;

        impl<'de> Visitor<'de> for TaskCpuVisitor {
            type Value = TaskCpu;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a CPU's number, or { budget = \"2ms\", period = \"10ms\" }")
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<TaskCpu, E> {
                let number = u32::try_from(value)
                    .map_err(|_| E::invalid_value(de::Unexpected::Signed(value), &self))?;
                Ok(TaskCpu { number: Some(number), budget: None })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<TaskCpu, A::Error> {
                #[derive(Deserialize)]
                #[serde(deny_unknown_fields)]
                struct Table {
                    number: Option<u32>,
                    budget: Spanned<String>,
                    period: Spanned<String>,
                }
                let table = Table::deserialize(de::value::MapAccessDeserializer::new(map))?;
                let Table { number, budget, period } = table;
                Ok(TaskCpu { number, budget: Some(Budget { budget, period }) })
            }
        }

        deserializer.deserialize_any(TaskCpuVisitor)
    }
}

impl Budget {
    /// Parses and checks both times.
    pub fn check(&self, problems: &mut Vec<Problem>) -> Option<CpuTime> {
        let mut read = |text: &Spanned<String>| {
            let time = humantime::parse_duration(text.get_ref());
            time.inspect_err(|error| {
                let message = format!("invalid time `{}`: {error}", text.get_ref());
                let problem = Problem::new(text.span(), message);
                problems.push(problem.help("use digits and us, ms or s, as in \"2ms\""));
            })
            .ok()
        };
        let (budget, period) = (read(&self.budget)?, read(&self.period)?);
        let mut refuse = |text: &Spanned<String>, message: String| {
            problems.push(Problem::new(text.span(), message));
        };
        if budget < MIN_BUDGET {
            refuse(&self.budget, format!("the budget must be at least {MIN_BUDGET:?}"));
        } else if period > MAX_PERIOD {
            refuse(&self.period, format!("the period must be at most {MAX_PERIOD:?}"));
        } else if budget >= period {
            let message = "the budget must be shorter than the period".to_owned();
            let problem = Problem::new(self.budget.span(), message);
            problems.push(problem.help("remove `cpu` to allow a whole CPU"));
        } else {
            let [budget, period] = [budget, period].map(|time| time.as_nanos() as u64);
            return Some(CpuTime { budget, period });
        }
        None
    }
}

/// Reservations of each CPU by name.
#[derive(Default)]
pub struct Promises {
    cpus: BTreeMap<u32, Vec<(String, u64)>>,
}

impl Promises {
    /// Adds the budget of a scheduling context of `name` on a CPU.
    pub fn add(&mut self, cpu: u32, name: &str, time: Option<CpuTime>) {
        let Some(time) = time else { return };
        let parts = u128::from(time.budget) * u128::from(PARTS) / u128::from(time.period.max(1));
        self.cpus.entry(cpu).or_default().push((name.to_owned(), parts as u64));
    }

    /// Reports CPUs with more than 100 % reserved.
    pub fn check(self, problems: &mut Vec<Problem>) {
        for (cpu, promised) in self.cpus {
            let sum: u64 = promised.iter().map(|(_, parts)| parts).sum();
            if sum <= PARTS {
                continue;
            }
            let percent = |parts: u64| format!("{:.1} %", parts as f64 * 100.0 / PARTS as f64);
            let parts: Vec<String> = promised
                .iter()
                .map(|(name, parts)| format!("`{name}` {}", percent(*parts)))
                .collect();
            let message = format!(
                "CPU {cpu} is reserved to {} of its time: {}",
                percent(sum),
                parts.join(", ")
            );
            let problem = Problem { span: None, ..Problem::new(0..0, message) };
            problems.push(problem.help("reduce the budgets, or use other CPUs"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::{self, Overrides};

    /// Compiles a description with these parts; returns the first problem, or the CPU times of
    /// servers, tasks and VMs.
    fn compiled(parts: &str) -> Result<Vec<Option<CpuTime>>, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("system.toml");
        let head = "[system]\nboard = \"pc\"\nlog = \"com2\"\nshare_cpus = true\n";
        std::fs::write(&file, format!("{head}{parts}")).unwrap();
        let resolved =
            validate::validate(&file, Overrides::default()).map_err(|error| error.to_string())?;
        let servers = resolved.servers.iter().map(|server| server.cpu_time);
        let tasks = resolved.tasks.iter().map(|task| task.cpu_time);
        Ok(servers.chain(tasks).chain(resolved.vms.iter().map(|vm| vm.cpu_time)).collect())
    }

    fn vm(more: &str) -> String {
        format!("[[vm]]\nname = \"one\"\nmemory = \"16M\"\nkernel = \"micro:hello\"\n{more}\n")
    }

    fn task(name: &str, more: &str) -> String {
        format!("[[task]]\nname = \"{name}\"\nbinary = \"check-hello\"\n{more}\n")
    }

    #[test]
    fn servers_tasks_and_vms_may_have_budgets() {
        let time = |budget, period| Some(CpuTime { budget, period });
        let server = "[[server]]\nname = \"sw0\"\nkind = \"switch\"\n\
                      cpu = { budget = \"100us\", period = \"1ms\" }\n";
        let all = server.to_owned()
            + &task("a", "cpu = { number = 1, budget = \"1s\", period = \"2s\" }")
            + &task("b", "cpu = 1")
            + &vm("cpus = 2\ncpu = { budget = \"2ms\", period = \"10ms\" }");
        let expected = [
            time(100_000, 1_000_000),
            time(1_000_000_000, 2_000_000_000),
            None,
            time(2_000_000, 10_000_000),
        ];
        assert_eq!(compiled(&all), Ok(expected.to_vec()));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (more, complaint) in [
            ("cpu = { budget = \"2 apples\", period = \"1s\" }", "invalid time `2 apples`"),
            ("cpu = { budget = \"19us\", period = \"1s\" }", "must be at least 20µs"),
            ("cpu = { budget = \"1s\", period = \"11s\" }", "must be at most 10s"),
            ("cpu = { budget = \"1s\", period = \"1s\" }", "must be shorter than the period"),
            ("cpu = { budget = \"1s\" }", "missing field `period`"),
            ("cpu = { budget = \"1s\", period = \"2s\", share = 1 }", "unknown field `share`"),
        ] {
            let error = compiled(&vm(more)).unwrap_err();
            assert!(error.contains(complaint), "{error}");
        }
        let error = compiled(&task("a", "cpu = -1")).unwrap_err();
        assert!(error.contains("a CPU's number, or"), "{error}");
    }

    #[test]
    fn no_cpu_is_promised_more_than_once() {
        let part = |name, cpu, budget| {
            let cpu =
                format!("cpu = {{ number = {cpu}, budget = \"{budget}ms\", period = \"10ms\" }}");
            task(name, &cpu)
        };
        assert!(compiled(&(part("a", 0, 5) + &part("b", 0, 5) + &part("c", 1, 9))).is_ok());
        let error = compiled(&(part("a", 1, 5) + &part("b", 0, 5) + &part("c", 1, 6))).unwrap_err();
        let expected = "CPU 1 is reserved to 110.0 % of its time: `a` 50.0 %, `c` 60.0 %";
        assert!(error.contains(expected), "{error}");
        // Every virtual CPU counts where it is.
        let two = "cpus = { pin = [0, 0] }\ncpu = { budget = \"6ms\", period = \"10ms\" }";
        assert!(compiled(&vm(two)).unwrap_err().contains("CPU 0 is reserved to 120.0 %"));
        let apart = two.replace("[0, 0]", "[0, 1]");
        assert!(compiled(&vm(&apart)).is_ok());
    }
}
