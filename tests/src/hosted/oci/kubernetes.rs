//! Kubernetes with `parador oci` as the runtime of a RuntimeClass.

use super::cluster::{Cluster, NODE};
use super::containerd::{IMAGE, PAGE, PARADOR};
use super::succeed;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time limit for one pod, and for many.
const SLOW: Duration = Duration::from_secs(120);
const MANY_SLOW: &str = "--timeout=600s";
/// Pods at once, and pods of runc beside them.
const MANY: usize = 30;
const OTHERS: usize = 5;
/// Script of a container that waits.
const IDLE: &str = "trap 'exit 0' TERM; while :; do sleep 1; done";

/// The life of pods: configuration, probes, logs, commands, networks, the end of a VM, many at
/// once.
pub fn cluster() -> Result<()> {
    let mut cluster = Cluster::new()?;
    let done = prepare(&cluster)
        .and_then(|()| life(&cluster))
        .and_then(|()| killed(&cluster))
        .and_then(|()| many(&cluster))
        .and_then(|()| cluster.end());
    done.with_context(|| cluster.logs())
}

fn prepare(cluster: &Cluster) -> Result<()> {
    cluster.apply(&json!({
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": { "name": PARADOR },
        "handler": PARADOR,
        "overhead": { "podFixed": { "memory": "96Mi" } },
    }))?;
    cluster.apply(&json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": { "name": "pages" },
        "data": { "page": PAGE },
    }))
}

/// A container with a script.
fn container(name: &str, script: &str) -> Value {
    json!({
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "resources": { "limits": { "memory": "64Mi" } },
    })
}

/// A pod, without a class one of runc.
fn pod(name: &str, class: Option<&str>, containers: &[Value]) -> Value {
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "labels": { "test": name.split('-').next() } },
        "spec": {
            "nodeName": NODE,
            "containers": containers,
            "dnsPolicy": "Default",
            "enableServiceLinks": false,
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 5,
        },
    });
    if let Some(class) = class {
        pod["spec"]["runtimeClassName"] = json!(class);
    }
    pod
}

/// A pod with a server of the configuration's page, which is ready when it serves it, and a client.
fn web(class: &str) -> Value {
    let mut server = container("server", "echo begun; exec httpd -f -p 8080 -h /pages");
    server["volumeMounts"] = json!([{ "name": "pages", "mountPath": "/pages" }]);
    server["readinessProbe"] =
        json!({ "httpGet": { "path": "/page", "port": 8080 }, "periodSeconds": 1 });
    server["livenessProbe"] =
        json!({ "exec": { "command": ["cat", "/pages/page"] }, "timeoutSeconds": 10 });
    let mut pod = pod("web", Some(class), &[server, container("client", IDLE)]);
    pod["spec"]["volumes"] = json!([{ "name": "pages", "configMap": { "name": "pages" } }]);
    pod
}

fn wait_ready(cluster: &Cluster, name: &str) -> Result<()> {
    let wait = ["wait", "--for=condition=Ready", "--timeout=120s", "pod", name];
    cluster.kubectl(&wait, "").map(drop)
}

/// Fetches the page from a container.
fn fetch(cluster: &Cluster, from: [&str; 2], address: &str) -> Result<()> {
    let request = format!("printf 'GET /page HTTP/1.0\\r\\n\\r\\n' | nc {address} 8080");
    let [pod, container] = from;
    let answer =
        cluster.kubectl(&["exec", pod, "-c", container, "--", "sh", "-c", &request], "")?;
    ensure!(answer.ends_with(PAGE), "{from:?}: {answer:?}");
    Ok(())
}

fn life(cluster: &Cluster) -> Result<()> {
    cluster.apply(&web(PARADOR))?;
    cluster.apply(&pod("other", None, &[container("client", IDLE)]))?;
    wait_ready(cluster, "web")?;
    wait_ready(cluster, "other")?;
    let logs = cluster.kubectl(&["logs", "web", "-c", "server"], "")?;
    ensure!(logs == "begun\n", "{logs:?}");
    let exec = ["exec", "-i", "web", "-c", "client", "--", "sh", "-c"];
    let ended = cluster.kubectl_code(&[&exec[..], &["cat; exit 42"]].concat(), "some input\n")?;
    ensure!(ended.0 == Some(42) && ended.1.starts_with("some input\n"), "{ended:?}");
    let kernel = ["exec", "web", "-c", "client", "--", "cat", "/proc/version"];
    let kernel = cluster.kubectl(&kernel, "")?;
    ensure!(kernel.contains("-parador"), "not in a VM: {kernel}");
    fetch(cluster, ["web", "client"], "127.0.0.1")?;
    fetch(cluster, ["other", "client"], &cluster.field("pod", "web", ".status.podIP")?)?;
    forwarded(cluster)
}

/// Fetches the page by a forwarded port, whose connections containerd makes.
fn forwarded(cluster: &Cluster) -> Result<()> {
    let forwarded = cluster.forward("web", 8080)?;
    for number in 0..3 {
        let answer = super::fetch(forwarded.port, SLOW);
        let answer = answer.with_context(|| format!("connection {number}"))?;
        ensure!(answer.ends_with(PAGE), "the forwarded port answers {answer:?}");
    }
    Ok(())
}

/// Waits until a container of the pod has started again.
fn wait_restarted(cluster: &Cluster, container: &str) -> Result<()> {
    let count = format!(".status.containerStatuses[?(@.name==\"{container}\")].restartCount");
    let deadline = Instant::now() + SLOW;
    while cluster.field("pod", "web", &count)? == "0" {
        ensure!(Instant::now() < deadline, "{container} does not start again");
        sleep(Duration::from_millis(500));
    }
    wait_ready(cluster, "web")
}

/// A container that has ended starts again in its VM; after the end of the VM the pod does.
fn killed(cluster: &Cluster) -> Result<()> {
    let vms = cluster.containerd.vms()?;
    let [vm] = &vms[..] else { anyhow::bail!("one VM, not {vms:?}") };
    cluster.kubectl(&["exec", "web", "-c", "client", "--", "kill", "1"], "")?;
    wait_restarted(cluster, "client")?;
    ensure!(cluster.containerd.vms()? == vms, "the container has another VM");
    let server = ".status.containerStatuses[?(@.name==\"server\")].restartCount";
    ensure!(cluster.field("pod", "web", server)? == "0", "the server has started again");
    succeed(Command::new("kill").args(["-9", vm]))?;
    wait_restarted(cluster, "server")?;
    fetch(cluster, ["web", "client"], "127.0.0.1")?;
    cluster.kubectl(&["delete", "pod", "web", "other", MANY_SLOW], "").map(drop)
}

fn many(cluster: &Cluster) -> Result<()> {
    let names =
        |prefix: &'static str, count| (0..count).map(move |index| format!("{prefix}-{index}"));
    let script = format!("echo ready; {IDLE}");
    let new = |name: &str, class| pod(name, class, &[container("only", &script)]);
    let mut pods: Vec<_> = names("vm", MANY).map(|name| new(&name, Some(PARADOR))).collect();
    pods.extend(names("runc", OTHERS).map(|name| new(&name, None)));
    let begin = Instant::now();
    cluster.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": pods }))?;
    cluster.kubectl(&["wait", "--for=condition=Ready", MANY_SLOW, "pod", "--all"], "")?;
    println!(
        "{MANY} pods and {OTHERS} of runc: ready after {:.1} s",
        begin.elapsed().as_secs_f64()
    );
    ensure!(cluster.containerd.vms()?.len() == MANY, "not a VM for each pod");
    for name in names("vm", MANY) {
        let logs = cluster.kubectl(&["logs", &name], "")?;
        ensure!(logs == "ready\n", "{name}: {logs:?}");
    }
    cluster.kubectl(&["delete", "pod", "--all", MANY_SLOW], "").map(drop)
}
