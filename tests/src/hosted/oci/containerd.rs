//! containerd as an engine of `parador oci`: pods by its CRI, and containers by `ctr`.
//!
//! The test has a containerd of its own, and speaks gRPC with it by curl. Numbers of fields are
//! those of `runtime.v1` (`api.proto` in Kubernetes' `cri-api`).

use super::cost;
pub use super::cost::Cost;
use super::protobuf::{Fields, Message};
use super::{Engine, GONE, SLOW, ensure_host_memory, make_root, no_mounts_below, succeed};
use crate::hosted::succeed_with;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Image of sandboxes and containers.
pub const IMAGE: &str = "localhost/test:1";
/// Handler of pods, a name of the configuration: the runtime under test.
pub const PARADOR: &str = "parador";
/// The same: runc.
pub const RUNC: &str = "runc";
/// The same: crun, which need not exist.
pub const CRUN: &str = "crun";
/// Program of runc.
pub const RUNC_PATH: &str = "/usr/sbin/runc";
/// Program of crun.
pub const CRUN_PATH: &str = "/usr/bin/crun";
/// Page of the server in a container.
pub const PAGE: &str = "a page";
/// Folder with CNI plugins of Debian's containernetworking-plugins.
const PLUGINS: &str = "/usr/lib/cni";
/// States of containers (`ContainerState`).
const RUNNING: u64 = 1;
const EXITED: u64 = 2;
/// Interval of checks.
const INTERVAL: Duration = Duration::from_millis(50);
/// The same for logs, whose time is measured.
const LOG_INTERVAL: Duration = Duration::from_millis(2);

/// Program that the test needs, by its Debian package.
const NEEDED: [(&str, &str); 4] = [
    ("/usr/bin/containerd", "containerd"),
    (RUNC_PATH, "runc"),
    ("/usr/bin/curl", "curl"),
    ("/usr/lib/cni/bridge", "containernetworking-plugins"),
];

/// containerd with folders, a network and an image of its own.
pub struct Containerd {
    engine: Engine,
    runtime: PathBuf,
    /// Name of the bridge, and of the parent cgroup of pods.
    bridge: String,
    parent: String,
    process: Option<Child>,
}

/// A pod: its name for containerd, and its address.
pub struct Pod {
    /// Name.
    pub id: String,
    address: String,
    config: Message,
}

impl Containerd {
    /// Starts containerd.
    pub fn new() -> Result<Self> {
        for (file, package) in NEEDED {
            ensure!(Path::new(file).exists(), "{file} is missing: apt-get install {package}");
        }
        let engine = Engine::new()?;
        let runtime = engine.make_runtime()?;
        let number = std::process::id();
        let bridge = format!("prd{number}");
        let parent = format!("/parador-test-{number}-pods");
        let mut containerd = Self { engine, runtime, bridge, parent, process: None };
        containerd.configure()?;
        containerd.start()?;
        containerd.load_image("k8s.io")?;
        Ok(containerd)
    }

    /// Returns the path of a file of this test.
    pub fn path(&self, name: &str) -> PathBuf {
        self.engine.path(name)
    }

    /// Folder of this test.
    pub fn folder(&self) -> &Path {
        self.engine.rig.folder()
    }

    /// The parent cgroup of pods.
    pub fn parent(&self) -> &str {
        &self.parent
    }

    /// Makes the parent cgroup of pods in each hierarchy, which the kubelet expects.
    pub fn make_parents(&self) -> Result<()> {
        let name = self.parent.trim_start_matches('/');
        let top = Path::new("/sys/fs/cgroup");
        let own = |folder: &Path| folder.join("cgroup.procs").exists();
        if own(top) {
            fs::create_dir(top.join(name)).context("cannot make a cgroup")?;
            let controllers = fs::read_to_string(top.join("cgroup.controllers"))?;
            let all: String =
                controllers.split_whitespace().map(|one| format!("+{one} ")).collect();
            return fs::write(top.join(name).join("cgroup.subtree_control"), all)
                .context("cannot delegate controllers");
        }
        for hierarchy in fs::read_dir(top).context("no cgroups")?.flatten() {
            if own(&hierarchy.path()) {
                fs::create_dir_all(hierarchy.path().join(name)).context("cannot make a cgroup")?;
            }
        }
        Ok(())
    }

    /// Returns the processes of all VMs.
    pub fn vms(&self) -> Result<Vec<String>> {
        let sandboxes = fs::read_dir(self.path("parador-root/k8s.io")).context("no containers")?;
        let states = sandboxes.flatten().filter_map(|entry| {
            let state: Value =
                serde_json::from_slice(&fs::read(entry.path().join("state.json")).ok()?).ok()?;
            let has_own_vm = state["folder"] == state["vm_folder"];
            has_own_vm.then(|| state["carrier"]["pid"].to_string())
        });
        states.map(|carrier| super::child_of(&carrier)).collect()
    }

    /// Writes the configurations of containerd and of the pods' network.
    fn configure(&self) -> Result<()> {
        let mut handlers = String::new();
        let [runc, crun] = [RUNC_PATH, CRUN_PATH].map(Path::new);
        for (name, program) in [(PARADOR, &*self.runtime), (RUNC, runc), (CRUN, crun)] {
            let root = self.path(&format!("{name}-root"));
            handlers += &format!(
                "{name} = {{ runtime_type = \"io.containerd.runc.v2\", \
                 pod_annotations = [\"dev.parador.*\"], \
                 options = {{ BinaryName = {program:?}, Root = {root:?} }} }}\n"
            );
        }
        let text = format!(
            "version = 2\nroot = {root:?}\nstate = {state:?}\n\
             disabled_plugins = [\"io.containerd.internal.v1.opt\"]\n\
             [grpc]\naddress = {socket:?}\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"{IMAGE}\"\n\
             restrict_oom_score_adj = true\n\
             cni = {{ bin_dir = \"{PLUGINS}\", conf_dir = {cni:?} }}\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes]\n\
             {handlers}",
            root = self.path("root"),
            state = self.path("state"),
            socket = self.path("socket"),
            cni = self.path("cni"),
        );
        fs::write(self.path("containerd.toml"), text).context("cannot write")?;
        fs::create_dir(self.path("cni")).context("cannot make a folder")?;
        let network = json!({
            "cniVersion": "0.4.0",
            "name": self.bridge,
            "plugins": [{
                "type": "bridge",
                "bridge": self.bridge,
                "isGateway": true,
                "ipam": {
                    "type": "host-local",
                    "dataDir": self.path("addresses"),
                    "ranges": [[{ "subnet": "198.18.77.0/24" }]],
                    "routes": [{ "dst": "0.0.0.0/0" }],
                },
            }],
        });
        fs::write(self.path("cni/10-test.conflist"), network.to_string()).context("cannot write")
    }

    fn start(&mut self) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.path("containerd.log"))?;
        let mut command = Command::new("containerd");
        command.arg("--config").arg(self.path("containerd.toml"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.process = Some(command.spawn().context("cannot start containerd")?);
        let deadline = Instant::now() + SLOW;
        while self.call("Version", &Message::default()).is_err() {
            ensure!(Instant::now() < deadline, "containerd does not answer:\n{}", self.log());
            sleep(INTERVAL);
        }
        Ok(())
    }

    /// Kills containerd alone: its shims and the containers continue.
    fn kill(&mut self) -> Result<()> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        process.kill().context("cannot kill containerd")?;
        process.wait().map(drop).context("cannot wait for containerd")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("containerd.log")).unwrap_or_default()
    }

    fn ctr(&self, namespace: &str) -> Command {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "60", "ctr", "--address"]).arg(self.path("socket"));
        command.args(["--namespace", namespace]).stdin(Stdio::null());
        command
    }

    /// Makes an image of one layer, and gives it to containerd.
    fn load_image(&self, namespace: &str) -> Result<()> {
        let image = self.path("image");
        if !image.exists() {
            make_root(&self.path("tree"))?;
            for folder in ["dev", "proc", "sys", "www"] {
                fs::create_dir(self.path("tree").join(folder)).context("cannot make a folder")?;
            }
            fs::write(self.path("tree/www/page"), PAGE).context("cannot write")?;
            fs::create_dir(&image).context("cannot make a folder")?;
            let tar = |folder: &Path, file: &Path, names: &[&str]| {
                succeed(Command::new("tar").arg("-C").arg(folder).arg("-cf").arg(file).args(names))
            };
            tar(&self.path("tree"), &image.join("layer.tar"), &["."])?;
            let sum = succeed_with(Command::new("sha256sum").arg(image.join("layer.tar")))?;
            let sum = sum.split_whitespace().next().context("no sum")?;
            let config = json!({
                "architecture": "amd64",
                "os": "linux",
                "config": { "Env": ["PATH=/bin"], "Cmd": ["sleep", "1000"] },
                "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{sum}")] },
            });
            let manifest = json!([{
                "Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"],
            }]);
            for (name, content) in [("config.json", &config), ("manifest.json", &manifest)] {
                fs::write(image.join(name), content.to_string()).context("cannot write")?;
            }
            let names = ["manifest.json", "config.json", "layer.tar"];
            tar(&image, &self.path("image.tar"), &names)?;
        }
        let mut import = self.ctr(namespace);
        succeed(import.args(["images", "import"]).arg(self.path("image.tar")))
    }

    /// Calls a method of the CRI's runtime service.
    fn call(&self, method: &str, request: &Message) -> Result<Fields> {
        let body = request.encoded();
        // No compression, and the length.
        let length = u32::try_from(body.len()).context("a long request")?.to_be_bytes();
        let sent = [&[0], &length[..], body].concat();
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--max-time", "100", "--http2-prior-knowledge"]);
        curl.args(["--header", "content-type: application/grpc", "--header", "te: trailers"]);
        curl.args(["--data-binary", "@-", "--output", "-"]);
        // The trailers have the status.
        curl.args(["--dump-header", "/dev/stderr", "--unix-socket"]).arg(self.path("socket"));
        curl.arg(format!("http://localhost/runtime.v1.RuntimeService/{method}"));
        curl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut curl = curl.spawn().context("cannot start curl")?;
        let written = curl.stdin.take().context("no input")?.write_all(&sent);
        let ended = curl.wait_with_output().context("cannot wait for curl")?;
        let trailers = String::from_utf8_lossy(&ended.stderr);
        if !trailers.lines().any(|line| line.trim() == "grpc-status: 0") {
            bail!("{method}: {trailers}");
        }
        written.context("curl has not read the request")?;
        Fields::decode(ended.stdout.get(5..).context("a short answer")?)
    }

    /// Starts a pod, whose containers have 192 MiB, and its VM 80 MiB more.
    pub fn run_pod(&self, name: &str, handler: &str) -> Result<Pod> {
        let metadata = Message::default().text(1, name).text(2, name).text(3, "test");
        let annotation = Message::default().text(1, "dev.parador.memory").text(2, "80M");
        let memory = Message::default().number(4, 192 << 20); // memory_limit_in_bytes
        let sysctl = Message::default().text(1, "kernel.shm_rmid_forced").text(2, "1");
        let linux = Message::default().text(1, &self.parent).message(3, &sysctl);
        let linux = linux.message(5, &memory); // resources
        let logs = self.path(name);
        let config = Message::default()
            .message(1, &metadata)
            .text(2, name) // hostname
            .text(3, logs.to_str().context("a path")?) // log_directory
            .message(7, &annotation)
            .message(8, &linux);
        fs::create_dir(&logs).context("cannot make a folder")?;
        let request = Message::default().message(1, &config).text(2, handler);
        let id = self.call("RunPodSandbox", &request)?.text(1);
        let status = self.call("PodSandboxStatus", &Message::default().text(1, &id))?;
        let address = status.message(1)?.message(5)?.text(1);
        Ok(Pod { id, address, config })
    }

    /// Starts a container of a pod, which executes a script.
    pub fn run_container(&self, pod: &Pod, name: &str, script: &str) -> Result<String> {
        self.run_with(pod, name, script, &Message::default())
    }

    /// Starts a container of a pod with options of Linux.
    fn run_with(&self, pod: &Pod, name: &str, script: &str, linux: &Message) -> Result<String> {
        let config = Message::default()
            .message(1, &Message::default().text(1, name))
            .message(2, &Message::default().text(1, IMAGE));
        let config = ["sh", "-c", script].iter().fold(config, |config, word| config.text(3, word));
        let config = config.text(11, &format!("{name}.log")); // log_path
        let config = config.message(15, linux);
        let request = Message::default().text(1, &pod.id);
        let request = request.message(2, &config).message(3, &pod.config);
        let id = self.call("CreateContainer", &request)?.text(1);
        self.call("StartContainer", &Message::default().text(1, &id))?;
        Ok(id)
    }

    /// Executes a command in a container; returns its exit code and output.
    pub fn exec(&self, container: &str, command: &[&str]) -> Result<(u64, String)> {
        let request = Message::default().text(1, container);
        let request = command.iter().fold(request, |request, word| request.text(2, word));
        let answer = self.call("ExecSync", &request.number(3, 60))?; // timeout in seconds
        Ok((answer.number(3), answer.text(1)))
    }

    /// Checks that the page of a server can be fetched in a container.
    fn fetch(&self, container: &str, address: &str) -> Result<()> {
        let request = format!("printf 'GET /page HTTP/1.0\\r\\n\\r\\n' | nc {address} 8080");
        let deadline = Instant::now() + GONE;
        loop {
            let (code, answer) = self.exec(container, &["sh", "-c", &request])?;
            if code == 0 && answer.ends_with(PAGE) {
                return Ok(());
            }
            // The server may not listen yet.
            ensure!(Instant::now() < deadline, "{address} answers {code}: {answer:?}");
            sleep(INTERVAL);
        }
    }

    /// Returns the state and the exit code of a container.
    fn status(&self, container: &str) -> Result<(u64, u64)> {
        let request = Message::default().text(1, container);
        let status = self.call("ContainerStatus", &request)?.message(1)?;
        Ok((status.number(3), status.number(7)))
    }

    /// Waits for the end of a container; returns its exit code.
    fn wait(&self, container: &str) -> Result<u64> {
        let deadline = Instant::now() + SLOW;
        loop {
            match self.status(container)? {
                (EXITED, code) => return Ok(code),
                other => ensure!(Instant::now() < deadline, "{container} is {other:?}"),
            }
            sleep(INTERVAL);
        }
    }

    /// Waits until a container has printed a text.
    pub fn wait_for_log(&self, pod: &str, name: &str, text: &str) -> Result<()> {
        let path = self.path(pod).join(format!("{name}.log"));
        let deadline = Instant::now() + SLOW;
        loop {
            let log = fs::read_to_string(&path).unwrap_or_default();
            if log.contains(text) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "{text:?} is not in the log: {log:?}");
            sleep(LOG_INTERVAL);
        }
    }

    /// Ends and removes a pod.
    pub fn remove_pod(&self, pod: &str) -> Result<()> {
        let request = Message::default().text(1, pod);
        self.call("StopPodSandbox", &request)?;
        self.call("RemovePodSandbox", &request).map(drop)
    }

    /// Ends and removes all pods, also those of a kubelet.
    pub fn remove_pods(&self) -> Result<()> {
        for pod in self.call("ListPodSandbox", &Message::default())?.messages(1)? {
            self.remove_pod(&pod.text(1))?;
        }
        Ok(())
    }

    /// Returns the memory and the CPU time of all processes of pods.
    pub fn cost(&self, pods: &[&Pod]) -> Result<Cost> {
        let ids: Vec<&str> = pods.iter().map(|pod| &*pod.id).collect();
        cost::of_pods(&ids)
    }

    /// Returns the process of a pod's VM.
    fn vm(&self, pod: &Pod) -> Result<String> {
        let text = fs::read(self.path("parador-root/k8s.io").join(&pod.id).join("state.json"));
        let state: Value = serde_json::from_slice(&text?).context("no state")?;
        super::child_of(&state["carrier"]["pid"].to_string())
    }

    /// Checks that pods and containers, which were deleted, have left no trace. The parent cgroup
    /// is the kubelet's.
    pub fn nothing_left(&self) -> Result<()> {
        self.remove_parents()?;
        no_mounts_below(self.engine.rig.folder())?;
        let links =
            succeed_with(Command::new("ip").args(["link", "show", "master", &self.bridge]))?;
        ensure!(links.is_empty(), "interfaces are left:\n{links}");
        for folder in ["run/parador", "parador-root/k8s.io", "parador-root/test"] {
            let entries = fs::read_dir(self.path(folder)).into_iter().flatten().flatten();
            let left: Vec<_> = entries.map(|entry| entry.file_name()).collect();
            ensure!(left.is_empty(), "left in {folder}: {left:?}");
        }
        Ok(())
    }

    /// Removes the parent cgroup of pods, in each hierarchy.
    fn remove_parents(&self) -> Result<()> {
        let parent = self.parent.trim_start_matches('/');
        let all = Command::new("find").args(["/sys/fs/cgroup", "-name", parent]).output()?;
        for parent in String::from_utf8_lossy(&all.stdout).lines() {
            // Those of the kubelet's classes of pods.
            let below = Command::new("find").args([parent, "-depth", "-type", "d"]).output()?;
            for cgroup in String::from_utf8_lossy(&below.stdout).lines() {
                fs::remove_dir(cgroup).with_context(|| format!("{cgroup} is left"))?;
            }
        }
        Ok(())
    }

    /// Ends containerd, and checks that no process is left.
    pub fn end(&mut self) -> Result<()> {
        self.kill()?;
        self.engine.no_processes()
    }
}

impl Drop for Containerd {
    fn drop(&mut self) {
        // Nothing can be done where something fails.
        let _ = self.remove_pods();
        let _ = self.remove_parents();
        let _ = self.kill();
        let _ = Command::new("ip").args(["link", "del", &self.bridge]).status();
    }
}

/// Pods by the CRI, one of runc among them, and containers by `ctr`.
pub fn pods() -> Result<()> {
    let mut containerd = Containerd::new()?;
    let done = life_of_pods(&mut containerd).and_then(|()| by_ctr(&containerd));
    let done = done.and_then(|()| containerd.nothing_left()).and_then(|()| containerd.end());
    done.with_context(|| containerd.log())
}

fn life_of_pods(containerd: &mut Containerd) -> Result<()> {
    const SERVE: &str = "echo begun; exec httpd -f -p 8080 -h /www";
    const IDLE: &str = "trap 'exit 3' TERM; while :; do sleep 0.1; done";
    let pod = containerd.run_pod("pod", PARADOR)?;
    let server = containerd.run_container(&pod, "server", SERVE)?;
    let client = containerd.run_container(&pod, "client", IDLE)?;
    let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", containerd.vm(&pod)?))?;
    let own = format!(":{}/{}\n", containerd.parent, pod.id);
    ensure!(cgroups.contains(&own), "the VM is not below the pod's cgroup:\n{cgroups}");
    ensure_host_memory(&pod.id, 192 + 80 + 32)?;
    containerd.wait_for_log("pod", "server", "stdout F begun\n")?;
    containerd.fetch(&client, "127.0.0.1")?;
    for address in ["127.0.0.1", &pod.address] {
        fetch_in_namespace(&containerd.vm(&pod)?, address)?;
    }
    let ended = containerd.exec(&client, &["sh", "-c", "hostname; exit 42"])?;
    ensure!(ended == (42, "pod\n".to_owned()), "{ended:?}");
    // Its IPC namespace, with the sandbox's setting, and its PID namespace are the pod's.
    let script = "cat /proc/sys/kernel/shm_rmid_forced /proc/1/cmdline";
    let ended = containerd.exec(&client, &["sh", "-c", script])?;
    ensure!(ended == (0, "1\nsleep\x001000\0".to_owned()), "{ended:?}");
    lack_of_memory(containerd, &pod)?;
    let other = containerd.run_pod("other", RUNC)?;
    let other_server = containerd.run_container(&other, "server", SERVE)?;
    containerd.fetch(&client, &other.address)?;
    containerd.fetch(&other_server, &pod.address)?;
    let statistics = containerd.call("ContainerStats", &Message::default().text(1, &server))?;
    let statistics = statistics.message(1)?;
    let used = [statistics.message(2)?.message(2)?, statistics.message(3)?.message(2)?];
    ensure!(used.iter().all(|value| value.number(1) > 0), "no statistics: {used:?}");
    containerd.kill()?;
    containerd.start()?;
    for container in [&server, &client] {
        ensure!(containerd.status(container)?.0 == RUNNING, "a container has not survived");
    }
    containerd.fetch(&client, "127.0.0.1")?;
    let stop = Message::default().text(1, &client).number(2, 10); // timeout in seconds
    containerd.call("StopContainer", &stop)?;
    ensure!(containerd.wait(&client)? == 3, "the signal did not arrive");
    succeed(Command::new("kill").args(["-9", &containerd.vm(&pod)?]))?;
    ensure!(containerd.wait(&server)? == 255, "the container has outlived its VM");
    containerd.remove_pod(&pod.id)?;
    containerd.remove_pod(&other.id)
}

/// containerd learns that the guest has killed a container for lack of memory.
fn lack_of_memory(containerd: &Containerd, pod: &Pod) -> Result<()> {
    let limit = Message::default().number(4, 16 << 20); // memory_limit_in_bytes
    let linux = Message::default().message(1, &limit); // resources
    let script = "exec dd if=/dev/zero of=/dev/null bs=64M count=1";
    let container = containerd.run_with(pod, "eater", script, &linux)?;
    let code = containerd.wait(&container)?;
    let request = Message::default().text(1, &container);
    let reason = containerd.call("ContainerStatus", &request)?.message(1)?.text(10);
    ensure!((code, &*reason) == (137, "OOMKilled"), "code {code}, reason {reason:?}");
    Ok(())
}

/// Fetches the page of a pod from the host's side of its network namespace, as containerd does it
/// to forward a port.
fn fetch_in_namespace(process: &str, address: &str) -> Result<()> {
    let mut client = Command::new("nsenter");
    client.args(["--target", process, "--net", "curl", "--silent", "--show-error"]);
    client.args(["--max-time", "10", &format!("http://{address}:8080/page")]);
    let deadline = Instant::now() + GONE;
    loop {
        let ended = client.output().context("cannot start nsenter")?;
        if ended.stdout == PAGE.as_bytes() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&ended.stderr).into_owned();
        ensure!(Instant::now() < deadline, "{address} answers {text}");
        sleep(INTERVAL);
    }
}

/// A container of `ctr`: its output and exit code.
fn by_ctr(containerd: &Containerd) -> Result<()> {
    containerd.load_image("test")?;
    let mut run = containerd.ctr("test");
    run.args(["run", "--rm", "--runc-binary"]).arg(&containerd.runtime);
    run.arg("--runc-root").arg(containerd.path("parador-root"));
    run.arg("--cgroup").arg(format!("{}/one", containerd.parent));
    run.args([IMAGE, "one", "sh", "-c", "echo out; exit 7"]);
    let ended = run.output().context("cannot start ctr")?;
    let output = String::from_utf8_lossy(&ended.stdout);
    let is_good = ended.status.code() == Some(7) && output == "out\n";
    ensure!(is_good, "{} {output} {}", ended.status, String::from_utf8_lossy(&ended.stderr));
    Ok(())
}
