//! A Kubernetes cluster of one node, with containerd as its runtime: etcd, API server and kubelet
//! are processes of the test. There are no scheduler and no controllers: pods name their node.

use super::containerd::Containerd;
use super::succeed;
use crate::tools;
use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Name of the node.
pub const NODE: &str = "parador-test";
/// Time limit for the start of a server.
const START: Duration = Duration::from_secs(120);
/// Settings of this host that the kubelet changes (`kubelet/cm`, `setupKernelTunables`).
const SETTINGS: [&str; 6] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
];

/// Folder of device plugins; the kubelet has no option for it.
const FIXED: &str = "/var/lib/kubelet";

/// The cluster. Dropping it ends its processes.
pub struct Cluster {
    /// The container engine.
    pub containerd: Containerd,
    programs: PathBuf,
    processes: Vec<(&'static str, Child)>,
    /// Settings of this host, as they were.
    settings: Vec<(PathBuf, Vec<u8>)>,
    /// This host has a kubelet of its own, or had one.
    has_other: bool,
}

impl Cluster {
    /// Starts containerd and the cluster.
    ///
    /// # Errors
    /// A program is missing, cannot be built, or does not start.
    pub fn new() -> Result<Self> {
        let programs = tools::kubernetes()?;
        let containerd = Containerd::new()?;
        let settings = SETTINGS.iter().filter_map(|name| {
            let path = Path::new("/proc/sys").join(name);
            fs::read(&path).ok().map(|value| (path, value))
        });
        let settings = settings.collect();
        let has_other = Path::new(FIXED).exists();
        let mut cluster = Self { containerd, programs, processes: Vec::new(), settings, has_other };
        cluster.start()?;
        Ok(cluster)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.containerd.path(name)
    }

    fn start(&mut self) -> Result<()> {
        let [etcd, peers, api, kubelet] = free_ports()?;
        self.make_keys()?;
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let mut command = self.program("etcd");
        command.arg("--data-dir").arg(self.path("etcd"));
        command.args(["--listen-client-urls", &url(etcd), "--advertise-client-urls", &url(etcd)]);
        command.args(["--listen-peer-urls", &url(peers)]);
        command.args(["--initial-advertise-peer-urls", &url(peers)]);
        command.args(["--initial-cluster", &format!("default={}", url(peers))]);
        self.spawn("etcd", command)?;
        self.start_api_server(&url(etcd), api)?;
        self.start_kubelet(kubelet)?;
        let deadline = Instant::now() + START;
        while !self.kubectl(&["get", "nodes"], "").is_ok_and(|nodes| nodes.contains(" Ready ")) {
            ensure!(Instant::now() < deadline, "the node is not ready");
            sleep(Duration::from_millis(500));
        }
        Ok(())
    }

    /// Makes the key of service accounts, and a certificate by which the kubelet knows the API
    /// server; the kubelet listens on all addresses of this host.
    fn make_keys(&self) -> Result<()> {
        let folder = self.path("keys");
        fs::create_dir(&folder).context("cannot make a folder")?;
        let run = |arguments: &str| {
            let words = arguments.split(' ');
            succeed(Command::new("openssl").args(words).current_dir(&folder))
        };
        run("genrsa -out accounts.key 2048")?;
        run("rsa -in accounts.key -pubout -out accounts.pub")?;
        run(
            "req -x509 -newkey rsa:2048 -nodes -keyout api.key -out api.crt -days 2 -subj /CN=api",
        )?;
        let mut token = [0; 16];
        let mut random = File::open("/dev/urandom").context("no random numbers")?;
        random.read_exact(&mut token).context("no random numbers")?;
        let token = format!("{:032x}", u128::from_le_bytes(token));
        let users = format!("{token},admin,1,\"system:masters\"\n");
        fs::write(folder.join("users"), users).context("cannot write")?;
        fs::write(folder.join("token"), token).context("cannot write")
    }

    fn start_api_server(&mut self, etcd: &str, port: u16) -> Result<()> {
        let key = |name: &str| self.path("keys").join(name);
        let mut command = self.program("kube-apiserver");
        command.args(["--etcd-servers", etcd, "--bind-address", "127.0.0.1"]);
        command.args(["--secure-port", &port.to_string(), "--advertise-address", "198.18.77.1"]);
        command.args(["--service-cluster-ip-range", "198.18.78.0/24"]);
        command.args(["--endpoint-reconciler-type", "none", "--authorization-mode", "AlwaysAllow"]);
        command.args(["--disable-admission-plugins", "ServiceAccount"]);
        // No name server knows the node.
        command.args(["--kubelet-preferred-address-types", "InternalIP"]);
        command.args(["--service-account-issuer", "https://parador.test"]);
        command.arg("--service-account-key-file").arg(key("accounts.pub"));
        command.arg("--service-account-signing-key-file").arg(key("accounts.key"));
        command.arg("--token-auth-file").arg(key("users"));
        command.arg("--kubelet-client-certificate").arg(key("api.crt"));
        command.arg("--kubelet-client-key").arg(key("api.key"));
        command.arg("--cert-dir").arg(self.path("api"));
        let token = fs::read_to_string(key("token")).context("no token")?;
        let access = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "test", "cluster": {
                "server": format!("https://127.0.0.1:{port}"), "insecure-skip-tls-verify": true,
            }}],
            "users": [{ "name": "admin", "user": { "token": token } }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "admin" } }],
            "current-context": "test",
        });
        fs::write(self.path("kubeconfig"), access.to_string()).context("cannot write")?;
        self.spawn("kube-apiserver", command)?;
        let deadline = Instant::now() + START;
        while self.kubectl(&["get", "--raw", "/readyz"], "").is_err() {
            ensure!(Instant::now() < deadline, "the API server is not ready");
            sleep(Duration::from_millis(500));
        }
        Ok(())
    }

    fn start_kubelet(&mut self, port: u16) -> Result<()> {
        let own = |name: &str| self.path("kubelet").join(name);
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "port": port,
            "healthzPort": 0,
            "authentication": {
                "anonymous": { "enabled": false },
                "webhook": { "enabled": false },
                "x509": { "clientCAFile": self.path("keys/api.crt") },
            },
            "authorization": { "mode": "AlwaysAllow" },
            "containerRuntimeEndpoint": format!("unix://{}", self.path("socket").display()),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.containerd.parent(),
            "enforceNodeAllocatable": ["none"],
            "failCgroupV1": false,
            "failSwapOn": false,
            "makeIPTablesUtilChains": false,
            "localStorageCapacityIsolation": false,
            "imageGCHighThresholdPercent": 100,
            "evictionHard": { "memory.available": "100Mi" },
            "syncFrequency": "10s",
            "podLogsDir": own("logs"),
            "volumePluginDir": own("plugins"),
        });
        fs::create_dir(self.path("kubelet")).context("cannot make a folder")?;
        self.containerd.make_parents()?;
        fs::write(own("config"), config.to_string()).context("cannot write")?;
        let mut command = self.program("kubelet");
        command.arg("--kubeconfig").arg(self.path("kubeconfig"));
        command.arg("--config").arg(own("config")).arg("--root-dir").arg(own("root"));
        command.arg("--cert-dir").arg(own("keys")).args(["--hostname-override", NODE]);
        self.spawn("kubelet", command)
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        command.stdin(Stdio::null()).current_dir(self.containerd.folder());
        command
    }

    fn spawn(&mut self, name: &'static str, mut command: Command) -> Result<()> {
        let log = File::create(self.path(&format!("{name}.log"))).context("cannot make a log")?;
        let errors = log.try_clone().context("cannot copy a descriptor")?;
        let child = command.stdout(log).stderr(errors).spawn();
        self.processes.push((name, child.with_context(|| format!("cannot start {name}"))?));
        Ok(())
    }

    /// Calls kubectl with this input and returns its output.
    ///
    /// # Errors
    /// It fails.
    pub fn kubectl(&self, arguments: &[&str], input: &str) -> Result<String> {
        let (code, text) = self.kubectl_code(arguments, input)?;
        ensure!(code == Some(0), "kubectl {arguments:?}: {code:?}\n{text}");
        Ok(text)
    }

    /// Calls kubectl with this input; returns its exit code and output, errors included if it
    /// fails.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn kubectl_code(&self, arguments: &[&str], input: &str) -> Result<(Option<i32>, String)> {
        let mut command = self.kubectl_command(arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start kubectl")?;
        let written = child.stdin.take().context("no input")?.write_all(input.as_bytes());
        let ended = child.wait_with_output().context("cannot wait for kubectl")?;
        // It need not read its input.
        let _ = written;
        let mut text = String::from_utf8_lossy(&ended.stdout).into_owned();
        if !ended.status.success() {
            text += &String::from_utf8_lossy(&ended.stderr);
        }
        Ok((ended.status.code(), text))
    }

    /// Forwards a local port to one of a pod until the result is dropped.
    ///
    /// # Errors
    /// kubectl fails.
    pub fn forward(&self, pod: &str, port: u16) -> Result<Forwarded> {
        let mut command = self.kubectl_command(&["port-forward", pod, &format!(":{port}")]);
        let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start kubectl")?;
        let output = BufReader::new(child.stdout.take().context("no output")?);
        let mut forwarded = Forwarded { child, output, port: 0 };
        let mut line = String::new();
        forwarded.output.read_line(&mut line).context("no port")?;
        // Forwarding from 127.0.0.1:PORT -> 8080
        let port = line.split("127.0.0.1:").nth(1).and_then(|text| text.split(' ').next());
        let port = port.and_then(|port| port.parse().ok());
        forwarded.port = port.with_context(|| format!("no port: {line:?}"))?;
        Ok(forwarded)
    }

    fn kubectl_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "600"]).arg(self.programs.join("kubectl"));
        command.arg("--kubeconfig").arg(self.path("kubeconfig"));
        command.arg("--cache-dir").arg(self.path("kubectl")).args(arguments);
        command
    }

    /// Creates or changes an object.
    ///
    /// # Errors
    /// The API server refuses it.
    pub fn apply(&self, object: &Value) -> Result<()> {
        self.kubectl(&["apply", "-f", "-"], &object.to_string()).map(drop)
    }

    /// Returns a field of an object by a path of kubectl (JSONPath).
    ///
    /// # Errors
    /// There is no such object.
    pub fn field(&self, kind: &str, name: &str, path: &str) -> Result<String> {
        self.kubectl(&["get", kind, name, "-o", &format!("jsonpath={{{path}}}")], "")
    }

    /// The last lines of the logs of all servers.
    pub fn logs(&self) -> String {
        let mut text = String::new();
        for name in ["containerd", "etcd", "kube-apiserver", "kubelet"] {
            let log = fs::read_to_string(self.path(&format!("{name}.log"))).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(30)..];
            text += &format!("== {name}\n{}\n", last.join("\n"));
        }
        text
    }

    /// Ends kubelet, API server and etcd, and checks that nothing is left of deleted pods.
    ///
    /// # Errors
    /// A mount, process, file, interface or cgroup is left.
    pub fn end(&mut self) -> Result<()> {
        self.end_processes();
        self.containerd.nothing_left()?;
        self.containerd.end()
    }

    fn end_processes(&mut self) {
        // The last one uses those before it.
        while let Some((_, mut process)) = self.processes.pop() {
            let _ = process.kill();
            let _ = process.wait();
        }
        // The kubelet mounts it on itself, and leaves that.
        let root = self.path("kubelet/root");
        let _ = Command::new("umount").args(["--recursive", "--quiet"]).arg(root).status();
        // It removes the links to logs now and then only.
        for entry in fs::read_dir("/var/log/containers").into_iter().flatten().flatten() {
            let is_own = |target: PathBuf| target.starts_with(self.containerd.folder());
            if fs::read_link(entry.path()).is_ok_and(is_own) {
                let _ = fs::remove_file(entry.path());
            }
        }
        if !self.has_other {
            let _ = fs::remove_dir_all(FIXED);
        }
        for (path, value) in &self.settings {
            let _ = fs::write(path, value);
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.end_processes();
    }
}

/// Returns unused ports.
/// A forwarded port.
pub struct Forwarded {
    child: Child,
    /// Stays open: kubectl prints a line for each connection.
    output: BufReader<ChildStdout>,
    /// The local port.
    pub port: u16,
}

impl Drop for Forwarded {
    fn drop(&mut self) {
        // timeout(1) ends kubectl, too.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

fn free_ports() -> Result<[u16; 4]> {
    // All are held until all are known.
    let listeners = [0; 4].map(|_| TcpListener::bind(("127.0.0.1", 0)));
    let mut ports = [0; 4];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        let Ok(listener) = listener else { bail!("no free port") };
        *port = listener.local_addr().context("no port")?.port();
    }
    Ok(ports)
}
