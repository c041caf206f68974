//! Control socket: HTTP/1.1 and JSON on a Unix socket that only its owner can use.
//!
//! One thread serves it ([`crate::http`]). The number of event subscribers is limited, too, so that
//! a slow or malicious client affects neither other clients nor the VM.

use crate::console::listen;
use crate::control::{Answer, Command, Control, VmInfo};
use crate::events::EventRecord;
use crate::http::{
    self, Payload, ProblemDetails, Resource, Service, check_request, json, response,
};
use crate::state::State;
use crate::statistics::{Statistics, prometheus};
use hosted_command::failure::{Failure, IoContext};
use hosted_command::value::Size;
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, StatusCode};
use schemars::{JsonSchema, SchemaGenerator};
use serde::Serialize;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tokio::sync::oneshot;

/// Time limit of the VM for a command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(5);
/// Control socket; dropping it removes the socket.
pub struct ApiServer {
    path: PathBuf,
    /// Dropping it ends the thread.
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ApiServer {
    /// Creates the socket, with access for its owner only, and serves it.
    ///
    /// # Errors
    /// Another file, or a socket in use, has this name: code 71.
    pub fn start(path: &Path, control: Control) -> Result<Self, Failure> {
        let failed = |action: &str, error: &std::io::Error| Failure::file(action, path, error);
        let listener = listen(path, "the control socket")?;
        let (end, ended) = oneshot::channel();
        let mut server = Self { path: path.to_owned(), end: Some(end), thread: None };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|error| failed("serve the control socket", &error))?;
        let thread = thread::Builder::new().name("api".to_owned());
        let serve = async move {
            let Ok(listener) = tokio::net::UnixListener::from_std(listener) else { return };
            http::serve(listener, control, ended).await;
        };
        let thread = thread.spawn(move || runtime.block_on(serve));
        server.thread = Some(thread.os_error("create a thread")?);
        Ok(server)
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        // The socket may have been removed already.
        let _ = fs::remove_file(&self.path);
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            // Joining fails only after a panic of the thread, which has been reported.
            let _ = thread.join();
        }
    }
}

/// Response of `PUT`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct CommandResult {
    /// Lifecycle state after the command.
    pub state: State,
}

impl Service for Control {
    async fn reply(&self, request: Request<Incoming>) -> Result<Response<Payload>, ProblemDetails> {
        reply(request, self).await
    }
}

async fn reply(
    request: Request<Incoming>,
    control: &Control,
) -> Result<Response<Payload>, ProblemDetails> {
    check_request(&request, &PATHS)?;
    let (path, query) = (request.uri().path(), request.uri().query());
    let command = match (path, query) {
        ("/v1/vm/shutdown", Some("force" | "force=true")) => Some(Command::Terminate),
        ("/v1/vm/balloon", query) => Some(Command::Balloon(balloon_size(query)?)),
        (_, Some(query)) => {
            let text = format!("{path} has no parameter `{query}`");
            return Err(ProblemDetails::new(StatusCode::BAD_REQUEST, text));
        }
        ("/v1/openapi.json", None) => return json(&openapi()),
        ("/v1/vm", None) => return json(&control.vm()),
        ("/v1/vm/stats", None) => return json(&control.fresh_statistics().await),
        ("/v1/metrics", None) => {
            let text = prometheus(&[(None, control.fresh_statistics().await)]);
            return Ok(response("text/plain; version=0.0.4", text));
        }
        ("/v1/vm/boot", None) => Some(Command::Boot),
        ("/v1/vm/pause", None) => Some(Command::Pause),
        ("/v1/vm/resume", None) => Some(Command::Resume),
        ("/v1/vm/reset", None) => Some(Command::Reset),
        ("/v1/vm/shutdown", None) => Some(Command::Shutdown),
        _ => None,
    };
    match command {
        Some(command) => execute(control, command).await,
        None => events(control),
    }
}

/// Reads the parameter of `/v1/vm/balloon`.
fn balloon_size(query: Option<&str>) -> Result<u64, ProblemDetails> {
    let wrong = |text| ProblemDetails::new(StatusCode::BAD_REQUEST, text);
    let size = query.and_then(|query| query.strip_prefix("size="));
    let size = size.ok_or_else(|| wrong("expected the parameter `size=SIZE`".to_owned()))?;
    Size::parse(size).map(|size| size.0).map_err(wrong)
}

/// Streams past and future events.
fn events(control: &Control) -> Result<Response<Payload>, ProblemDetails> {
    let listener = control.subscribe().ok_or_else(|| {
        ProblemDetails::new(StatusCode::SERVICE_UNAVAILABLE, "too many event subscribers (limit 8)")
    })?;
    let mut response = response("application/jsonl", Bytes::new());
    *response.body_mut() = Payload { text: None, rest: Some(listener.into()) };
    Ok(response)
}

/// Executes a command and waits for its result.
async fn execute(control: &Control, command: Command) -> Result<Response<Payload>, ProblemDetails> {
    let refused = |text: String| ProblemDetails::new(StatusCode::CONFLICT, text);
    match tokio::time::timeout(COMMAND_TIMEOUT, control.submit(command)).await {
        Ok(Ok(answer)) => json(&CommandResult { state: Answer::map_err(answer, refused)? }),
        Ok(Err(_)) => Err(refused("the VM has exited".to_owned())),
        Err(_) => {
            let text = "the VM has not completed the command within 5 s";
            Err(ProblemDetails::new(StatusCode::GATEWAY_TIMEOUT, text))
        }
    }
}

/// Paths, their methods and summaries.
const PATHS: [Resource; 11] = [
    ("/v1/openapi.json", "GET", "This description."),
    ("/v1/vm", "GET", "Configuration and state of the VM."),
    ("/v1/vm/stats", "GET", "Statistics: events handled and host resources used."),
    ("/v1/metrics", "GET", "Statistics for Prometheus (text format 0.0.4)."),
    ("/v1/events", "GET", "Past and new events, one JSON object per line, until the VM exits."),
    ("/v1/vm/boot", "PUT", "Starts a VM that waits for boot."),
    ("/v1/vm/pause", "PUT", "Pauses the guest."),
    ("/v1/vm/resume", "PUT", "Resumes the guest."),
    ("/v1/vm/reset", "PUT", "Restarts the VM."),
    ("/v1/vm/balloon", "PUT", "Sets the target size of the memory balloon."),
    ("/v1/vm/shutdown", "PUT", "Presses the ACPI power button; with `force` kills the VM."),
];

/// Returns the description of this interface (OpenAPI 3.1).
pub fn openapi() -> Value {
    let settings = schemars::generate::SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
    });
    let mut schemas: SchemaGenerator = settings.into_generator();
    let content = |kind: &str, schema: Value| json!({ kind: { "schema": schema } });
    let vm = schemas.subschema_for::<VmInfo>().to_value();
    let statistics = schemas.subschema_for::<Statistics>().to_value();
    let line = schemas.subschema_for::<EventRecord>().to_value();
    let done = schemas.subschema_for::<CommandResult>().to_value();
    let problem = schemas.subschema_for::<ProblemDetails>().to_value();
    let mut paths = serde_json::Map::new();
    for (path, method, summary) in PATHS {
        let good = match path {
            "/v1/openapi.json" => content("application/json", json!({ "type": "object" })),
            "/v1/vm" => content("application/json", vm.clone()),
            "/v1/vm/stats" => content("application/json", statistics.clone()),
            "/v1/metrics" => content("text/plain", json!({ "type": "string" })),
            "/v1/events" => content("application/jsonl", line.clone()),
            _ => content("application/json", done.clone()),
        };
        let bad = content("application/problem+json", problem.clone());
        let mut operation = json!({
            "summary": summary,
            "responses": {
                "200": { "description": "Success.", "content": good },
                "4XX": { "description": "Refused; 409: the command does not fit the VM's state.", "content": bad.clone() },
                "5XX": { "description": "The command failed.", "content": bad },
            },
        });
        if path.ends_with("/shutdown") {
            operation["parameters"] = json!([{
                "name": "force", "in": "query", "allowEmptyValue": true,
                "description": "Kill the VM.", "schema": { "const": "true" },
            }]);
        }
        if path.ends_with("/balloon") {
            operation["parameters"] = json!([{
                "name": "size", "in": "query", "required": true,
                "description": "Memory that the guest returns to the host, at least 64 MiB less than it has.",
                "schema": schemas.subschema_for::<Size>().to_value(),
            }]);
        }
        paths.insert(path.to_owned(), json!({ (method.to_lowercase()): operation }));
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Parador: control of a VM",
            "description": "HTTP/1.1 on the socket of `parador run --api-socket`.",
            "version": "1",
        },
        "paths": paths,
        "components": { "schemas": schemas.take_definitions(true) },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::http::MAX_CONNECTIONS;
    use hosted_command::failure;
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn the_description_is_in_the_specification() {
        crate::specification::assert_shipped("openapi.json", &openapi());
    }

    fn served(folder: &Path) -> (ApiServer, Control) {
        let (control, _) = Control::new(Config::default(), 1 << 20, "process", None).unwrap();
        (ApiServer::start(&folder.join("s"), control.clone()).unwrap(), control)
    }

    fn ask(folder: &Path, request: &str) -> String {
        let mut stream = UnixStream::connect(folder.join("s")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut answer = Vec::new();
        // Who is cut off has what came before.
        let _ = stream.write_all(request.as_bytes());
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    }

    #[test]
    fn requests_are_judged() {
        let folder = tempfile::tempdir().unwrap();
        let (_server, _control) = served(folder.path());
        let head = |request: &str| format!("{request} HTTP/1.1\r\nhost: a\r\n\r\n");
        for (request, status, text) in [
            ("GET /v1/vm", "200", "\"state\":\"starting\""),
            ("GET /v1/openapi.json", "200", "\"openapi\":\"3.1.0\""),
            ("GET /v1/vm/stats", "200", "\"memory_bytes\":1048576"),
            ("GET /v1/metrics", "200", "parador_state{state=\"starting\"} 1"),
            ("GET /v1/nothing", "404", "no such resource: /v1/nothing"),
            ("PUT /v1/vm", "405", "supports GET only, not PUT"),
            ("GET /v1/vm/pause", "405", "allow: PUT"),
            ("GET /v1/vm/boot", "405", "allow: PUT"),
            ("PUT /v1/vm/pause?now", "400", "no parameter `now`"),
            ("PUT /v1/vm/shutdown?force=maybe", "400", "no parameter"),
            ("PUT /v1/vm/balloon", "400", "expected the parameter `size=SIZE`"),
            ("PUT /v1/vm/balloon?size=much", "400", "invalid size"),
            ("PUT /v1/vm/balloon?force", "400", "expected the parameter"),
        ] {
            let answer = ask(folder.path(), &head(request));
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
            assert!(answer.contains(text), "{request}: {answer}");
        }
        let body = "PUT /v1/vm/pause HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999\r\n\r\n";
        assert!(ask(folder.path(), body).starts_with("HTTP/1.1 413 "));
        let long = head(&format!("GET /{}", "a".repeat(1 << 20)));
        assert!(!ask(folder.path(), &long).contains("200 OK"));
        assert!(ask(folder.path(), "\0\0\0\0\r\n\r\n").starts_with("HTTP/1.1 400 "));
    }

    #[test]
    fn many_clients_that_say_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (_server, control) = served(folder.path());
        let connect = || UnixStream::connect(folder.path().join("s")).unwrap();
        let silent: Vec<_> = (0..2 * MAX_CONNECTIONS).map(|_| connect()).collect();
        // The last ones are closed at once, and the first ones in their time.
        let mut last = silent.last().unwrap();
        assert_eq!(last.read(&mut [0; 8]).unwrap(), 0);
        drop(silent);
        // Until it has noticed.
        while ask(folder.path(), "GET /v1/vm HTTP/1.1\r\nhost: a\r\n\r\n").is_empty() {
            thread::sleep(Duration::from_millis(10));
        }
        let events = "GET /v1/events HTTP/1.1\r\nhost: a\r\n\r\n";
        let ended = control.clone();
        let thread = thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            ended.ended(7, "told");
        });
        let answer = ask(folder.path(), events);
        assert!(answer.contains("\"event\":\"ended\",\"code\":7,\"reason\":\"told\""), "{answer}");
        thread.join().unwrap();
        assert!(
            ask(folder.path(), "PUT /v1/vm/pause HTTP/1.1\r\nhost: a\r\n\r\n").contains(" 409 ")
        );
    }

    #[test]
    fn the_socket() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let control = || Control::new(Config::default(), 0, "process", None).unwrap().0;
        let refused = || ApiServer::start(&path, control()).err().unwrap();
        let server = ApiServer::start(&path, control()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(refused().to_string().contains("another process"));
        drop(server);
        assert!(!path.exists());
        // As after a kill.
        drop(UnixListener::bind(&path).unwrap());
        drop(ApiServer::start(&path, control()).unwrap());
        fs::write(&path, "text").unwrap();
        assert_eq!(refused().code(), failure::OS_ERROR);
        assert_eq!(fs::read(&path).unwrap(), b"text");
    }
}
