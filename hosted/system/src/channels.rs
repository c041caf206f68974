//! Validation of `[[channel]]`: two different VMs that are not templates, and a valid size.

use crate::description::{Channel, Vm};
use hosted_command::problem::Problem;
use hosted_command::value::Size;
use proto::channel::{MAX_SIZE, MAX_VM_CHANNELS, MIN_SIZE};
use proto::system as compiled;
use toml::Spanned;

/// Returns the valid channels and reports the problems of the others.
pub fn check(
    described: &[Spanned<Channel>],
    vms: &[Spanned<Vm>],
    problems: &mut Vec<Problem>,
) -> Vec<compiled::Channel> {
    let mut channels = Vec::new();
    let mut ends = vec![0; vms.len()];
    for channel in described.iter().map(Spanned::get_ref) {
        let between = channel.between.get_ref();
        let [first, second] = &between[..] else {
            let message =
                format!("a channel connects two virtual machines (got {})", between.len());
            let problem = Problem::new(channel.between.span(), message);
            problems.push(problem.help("use between = [\"one\", \"other\"]"));
            continue;
        };
        let [first, second] = [first, second].map(|name| {
            let index = end(name, vms, problems)?;
            ends[index] += 1;
            if ends[index] == MAX_VM_CHANNELS + 1 {
                let message =
                    format!("`{}` has too many channels (limit {MAX_VM_CHANNELS})", name.get_ref());
                problems.push(Problem::new(name.span(), message));
            }
            Some(index as u8)
        });
        if first.is_some() && first == second {
            let problem = Problem::new(
                channel.between.span(),
                "a channel must connect two different virtual machines",
            );
            problems.push(problem.help("change one of the names"));
        }
        let Size(size) = *channel.size.get_ref();
        if !size.is_power_of_two() || !(MIN_SIZE..=MAX_SIZE).contains(&size) {
            let message = format!("invalid channel size {}", Size(size));
            let help = format!("use a power of two from {} to {}", Size(MIN_SIZE), Size(MAX_SIZE));
            problems.push(Problem::new(channel.size.span(), message).help(help));
        }
        if let (Some(first), Some(second)) = (first, second) {
            let between = [first, second];
            channels.push(compiled::Channel {
                between,
                size: size as u32,
                doorbell: channel.doorbell,
            });
        }
    }
    channels
}

/// Returns the index of the VM at an end.
fn end(name: &Spanned<String>, vms: &[Spanned<Vm>], problems: &mut Vec<Problem>) -> Option<usize> {
    let found = vms.iter().position(|vm| vm.get_ref().name.get_ref() == name.get_ref());
    let problem = match found.map(|index| vms[index].get_ref()) {
        Some(vm) if vm.template => {
            let message = format!("`{}` is a template", name.get_ref());
            Problem::new(name.span(), message).help("VMs created from a template have no channels")
        }
        Some(_) => return found,
        None => {
            let message = format!("no such virtual machine: `{}`", name.get_ref());
            Problem::new(name.span(), message)
        }
    };
    problems.push(problem);
    None
}
