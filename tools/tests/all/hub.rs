//! Models by name: downloads that fail in every way, the plan before them, and the stores of other programs.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use emberflow::Failure;
use emberflow::hub::Workload;
use emberflow::hub::client::{Hub, Patience};
use emberflow::hub::download::Source;
use emberflow::hub::name::ModelName;
use emberflow::hub::pull::pull;
use emberflow::hub::stores::{DownloadedFile, OwnStore, modified};
use emberflow_engine::Budget;
use indicatif::ProgressBar;
use serde_json::Value;

use crate::common::hub::{COMMIT, Reply, Request, TestHub};
use crate::common::terminal::Terminal;
use crate::common::{emberflow, save_rates, succeed};

const NAME: &str = "o/n";

/// The bundled model as a GGUF file.
fn model() -> &'static [u8] {
    static MODEL: OnceLock<Vec<u8>> = OnceLock::new();
    MODEL.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("demo.gguf");
        succeed(emberflow().arg("export").arg("-o").arg(&path));
        fs::read(path).unwrap()
    })
}

/// The program for a user with this home, and this hub.
fn user(home: &Path, hub: &str) -> Command {
    let mut command = emberflow();
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if [
            "HF_",
            "OLLAMA_",
            "LLAMA_",
            "XDG_DATA",
            "ALL_PROXY",
            "HTTP_PROXY",
            "HTTPS_PROXY",
        ]
        .iter()
        .any(|start| name.starts_with(start))
        {
            command.env_remove(name);
        }
    }
    let cache = home.join(".cache");
    save_rates(&cache);
    command
        .env_remove("EMBERFLOW_MODELS")
        .env("OLLAMA_MODELS", home.join(".ollama/models"))
        .env("HOME", home)
        .env("XDG_CACHE_HOME", cache)
        .env("HF_ENDPOINT", hub)
        .current_dir(home);
    command
}

fn told(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn printed(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

/// No hub: connections are refused.
const NOWHERE: &str = "http://127.0.0.1:9";

fn own(home: &Path) -> PathBuf {
    home.join(".local/share/emberflow/models")
}

#[test]
fn a_model_runs_by_its_name_and_is_removed() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let hub = TestHub::start(&[("README.md", b"text"), ("demo.gguf", model())], |_, _| ());
    let run = ["run", NAME, "-p", "A vector is", "-n", "8", "--json"];
    let first = succeed(user(home, &hub.address).args(run));
    let message = told(&first);
    assert!(
        message.contains("o/n: demo (40.8 MiB) fits in") && message.contains("tokens/s expected"),
        "{message}"
    );
    fs::write(home.join("demo.gguf"), model()).unwrap();
    let mut by_path = run;
    by_path[1] = "demo.gguf";
    let by_path = succeed(user(home, NOWHERE).args(by_path));
    assert_eq!(printed(&first)["text"], printed(&by_path)["text"]);
    assert!(hub.ranges("README.md").is_empty(), "it was not needed");

    // Now it is here, and no hub is asked.
    let again = succeed(user(home, NOWHERE).args(run));
    assert_eq!(printed(&first)["text"], printed(&again)["text"]);
    assert_eq!(told(&again), "");
    let listed = succeed(user(home, NOWHERE).args(["list", "--json"]));
    let listed = printed(&listed);
    assert_eq!(
        (&listed[0]["name"], &listed[0]["store"]),
        (&NAME.into(), &"emberflow".into())
    );
    assert_eq!(listed.as_array().unwrap().len(), 1);

    // What the user put beside it stays.
    let folder = own(home).join(NAME);
    fs::write(folder.join("mine.gguf"), "mine").unwrap();
    let removed = succeed(user(home, NOWHERE).args(["remove", NAME, "--json"]));
    assert_eq!(printed(&removed)["bytes"], model().len());
    let left: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["mine.gguf"]);
    let refused = user(home, NOWHERE).args(["remove", NAME]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        told(&refused).contains("was not downloaded by"),
        "{}",
        told(&refused)
    );
    assert!(folder.join("mine.gguf").exists());
}

#[test]
fn a_path_wins_over_a_name() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    fs::create_dir(home.join("o")).unwrap();
    fs::write(home.join(NAME), model()).unwrap();
    let run = ["run", NAME, "-p", "A", "-n", "2"];
    succeed(user(home, NOWHERE).args(run));
    fs::remove_file(home.join(NAME)).unwrap();
    // A dangling link is a path, too.
    std::os::unix::fs::symlink("gone", home.join(NAME)).unwrap();
    let missing = user(home, NOWHERE).args(run).output().unwrap();
    assert!(
        told(&missing).contains("does not exist"),
        "{}",
        told(&missing)
    );
}

#[test]
fn other_commands_and_an_offline_machine_download_nothing() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let hub = TestHub::start(&[("demo.gguf", model())], |_, _| ());
    for line in [
        "inspect o/n",
        "verify o/n",
        "perplexity o/n -f x",
        "pack o/n -o x",
        "bench decode o/n",
        "export o/n -o y",
    ] {
        let refused = user(home, &hub.address)
            .args(line.split(' '))
            .output()
            .unwrap();
        assert_eq!(refused.status.code(), Some(2), "{line}");
        assert!(
            told(&refused).contains("emberflow pull o/n"),
            "{line}: {}",
            told(&refused)
        );
    }
    let offline = user(home, &hub.address)
        .args(["run", NAME, "-p", "A"])
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .unwrap();
    assert!(
        told(&offline).contains("HF_HUB_OFFLINE"),
        "{}",
        told(&offline)
    );
    assert_eq!(offline.status.code(), Some(1));
    assert!(hub.asked().is_empty());
    for no_name in ["demo.gguf", "llama3", "/a/b", "../x"] {
        let refused = user(home, &hub.address)
            .args(["pull", no_name])
            .output()
            .unwrap();
        assert_eq!(refused.status.code(), Some(2), "{no_name}");
    }
}

/// Files of three lengths; the plan reads headers only.
#[test]
fn a_plan_precedes_the_download() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let folder = home.join("demo-hf");
    succeed(emberflow().args(["export", "-o"]).arg(&folder));
    let mut files = vec![("demo-F32.gguf".to_owned(), model().to_vec())];
    for quant in ["q8", "q4"] {
        let [packed, gguf] = ["ember", "gguf"].map(|ending| home.join(format!("{quant}.{ending}")));
        succeed(
            emberflow()
                .arg("pack")
                .arg(&folder)
                .arg("-o")
                .arg(&packed)
                .args(["--quant", quant]),
        );
        succeed(emberflow().arg("export").arg(&packed).arg("-o").arg(&gguf));
        let name = if quant == "q8" {
            "demo-Q8_0.gguf"
        } else {
            "demo-Q4_0.gguf"
        };
        files.push((name.to_owned(), fs::read(&gguf).unwrap()));
    }
    // An unknown type of weights, as in a format that is not supported yet.
    let mut strange = model().to_vec();
    let at = strange
        .windows(11)
        .position(|w| w == b"attn_q.weig")
        .unwrap();
    let place = (at..).find(|&at| strange[at..at + 3] == *b"ght").unwrap() + 3;
    strange[place + 20..place + 24].copy_from_slice(&40u32.to_le_bytes());
    files.push(("demo-Q4_K_M.gguf".to_owned(), strange));
    let files: Vec<(&str, &[u8])> = files
        .iter()
        .map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
        .collect();
    let hub = TestHub::start(&files, |_, _| ());

    let plan = succeed(user(home, &hub.address).args(["plan", NAME, "--json", "--memory", "1GiB"]));
    let plan = printed(&plan);
    let models = plan["models"].as_array().unwrap();
    let order: Vec<&str> = models
        .iter()
        .map(|model| model["file"].as_str().unwrap())
        .collect();
    assert_eq!(order, ["demo-Q4_K_M", "demo-Q4_0", "demo-Q8_0", "demo-F32"]);
    let why = models[0]["forecast"]["unsupported"]["why"]
        .as_str()
        .unwrap();
    assert!(
        why.contains("demo-Q4_K_M.gguf") && why.contains("NVFP4") && !why.contains("preview"),
        "{why}"
    );
    assert_eq!(plan["chosen"], "demo-Q4_0");
    assert_eq!(models[1]["forecast"]["runs"]["in_memory"], true);
    let longest = hub
        .asked()
        .iter()
        .filter_map(|request| request.range?.1)
        .max()
        .unwrap();
    assert!(longest < 6 << 20, "headers only");

    // What it needs is what the file itself needs, as far as two processes are alike.
    fs::write(home.join("here.gguf"), files[2].1).unwrap();
    let whole = printed(&succeed(user(home, NOWHERE).args([
        "plan",
        "here.gguf",
        "--json",
    ])));
    let small = ["plan", NAME, "--json", "--memory", "2MiB"];
    let small = printed(&succeed(user(home, &hub.address).args(small)));
    let of_name = &small["models"][1]["forecast"]["too_large"]["smallest_bytes"];
    let [of_name, of_file] =
        [of_name, &whole["smallest_bytes"]].map(|bytes| bytes.as_f64().unwrap());
    assert!(
        (0.9..1.1).contains(&(of_name / of_file)),
        "{of_name} {of_file}"
    );
    assert!(small["chosen"].is_null());

    // Too little for any, and a file of the user's choice.
    let refused = user(home, &hub.address)
        .args(["pull", NAME, "--memory", "2MiB"])
        .output()
        .unwrap();
    let message = told(&refused);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        message.contains("needs --memory") && message.contains("demo-F32"),
        "{message}"
    );
    let chosen = succeed(user(home, &hub.address).args(["pull", "o/n:q8_0", "--json"]));
    assert_eq!(
        printed(&chosen)["path"],
        own(home).join("o/n/demo-Q8_0.gguf").display().to_string()
    );
    let unknown = user(home, &hub.address)
        .args(["pull", "o/n:Q5_K_M"])
        .output()
        .unwrap();
    assert!(
        told(&unknown).contains("it has: demo-F32, demo-Q4_0"),
        "{}",
        told(&unknown)
    );
    let unsupported = user(home, &hub.address)
        .args(["run", "o/n:Q4_K_M", "-p", "A"])
        .output()
        .unwrap();
    assert_eq!(told(&unsupported).matches("emberflow:").count(), 1);
    assert!(
        told(&unsupported).contains("NVFP4"),
        "{}",
        told(&unsupported)
    );
    assert!(!own(home).join("o/n/demo-Q4_K_M.gguf").exists());
    // Nothing of the plans is left.
    let mut left: Vec<_> = fs::read_dir(own(home))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, [".lock", "o"]);
}

#[test]
fn a_folder_of_safetensors_is_pulled_whole() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let folder = home.join("demo-hf");
    succeed(emberflow().args(["export", "-o"]).arg(&folder));
    let names: Vec<String> = fs::read_dir(&folder)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    let bytes: Vec<Vec<u8>> = names
        .iter()
        .map(|name| fs::read(folder.join(name)).unwrap())
        .collect();
    let files: Vec<(&str, &[u8])> = names
        .iter()
        .map(String::as_str)
        .zip(bytes.iter().map(Vec::as_slice))
        .collect();
    let hub = TestHub::start(&files, |_, _| ());
    let run = ["run", NAME, "-p", "A vector is", "-n", "8", "--json"];
    let first = succeed(user(home, &hub.address).args(run));
    let mut by_path = run;
    by_path[1] = "demo-hf";
    let by_path = succeed(user(home, NOWHERE).args(by_path));
    assert_eq!(printed(&first)["text"], printed(&by_path)["text"]);
    for (name, bytes) in files {
        assert_eq!(fs::read(own(home).join(NAME).join(name)).unwrap(), bytes);
    }
}

/// A hub whose first answer with the file stops after 20 MiB for so long.
fn hub_that_stops(silence: Duration) -> TestHub {
    TestHub::start(&[("demo.gguf", model())], move |request, reply| {
        if request.range.is_none() && request.path.ends_with("gguf") {
            reply.stops = Some((PART, silence));
        }
    })
}

/// Bytes that it sends.
const PART: usize = 20 << 20;

/// Waits until the unfinished download in `home` has this many bytes.
fn wait_for_partial(home: &Path, child: &mut Child, bytes: usize) {
    let partial = own(home).join("o/n/.partial");
    let arrived = || {
        let mut files = fs::read_dir(&partial).into_iter().flatten().flatten();
        let file = files.next()?.metadata().ok()?;
        Some(file.len())
    };
    while arrived().is_none_or(|there| there < bytes as u64) {
        assert!(child.try_wait().unwrap().is_none(), "it has ended");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A download that Ctrl-C ends says where the same command goes on, which it does in another process; its progress begins
/// there.
#[test]
fn a_stopped_download_goes_on() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let hub = hub_that_stops(Duration::from_secs(600));
    for args in [&["run", NAME, "-p", "A"][..], &["pull", NAME]] {
        let mut child = user(home, &hub.address)
            .args(args)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        wait_for_partial(home, &mut child, PART);
        // A second one does not write to the same file.
        let second = user(home, &hub.address)
            .args(["pull", NAME])
            .output()
            .unwrap();
        assert!(
            told(&second).contains("another process is downloading"),
            "{}",
            told(&second)
        );
        let id = child.id().to_string();
        Command::new("kill").args(["-INT", &id]).status().unwrap();
        let stopped = child.wait_with_output().unwrap();
        assert_eq!(stopped.status.code(), Some(130));
        assert!(
            told(&stopped).ends_with(
                "stopped; 20.0 MiB of 40.8 MiB are here; the same command goes on from there\n"
            ),
            "{}",
            told(&stopped)
        );
        let listed = succeed(user(home, NOWHERE).args(["list", "--json"]));
        assert_eq!(printed(&listed), Value::Array(Vec::new()));
        if args[0] == "run" {
            succeed(user(home, NOWHERE).args(["remove", NAME]));
        }
    }
    let mut again = Terminal::start_as(
        &user(home, &hub.address),
        &["pull", NAME],
        home,
        Some("path"),
    );
    let first = again.wait("/40.77 MiB");
    assert!(first.ends_with("20.00 MiB/40.77 MiB"), "{first}");
    assert_eq!(again.end(), 0);
    assert_eq!(fs::read(own(home).join("o/n/demo.gguf")).unwrap(), model());
    assert_eq!(hub.ranges("demo.gguf").last(), Some(&PART));
    assert!(!own(home).join("o/n/.partial").exists());
    let up_to_date = succeed(user(home, &hub.address).args(["pull", NAME]));
    assert!(
        told(&up_to_date).contains("is already downloaded"),
        "{}",
        told(&up_to_date)
    );
}

/// So does one whose connection is lost for good.
#[test]
fn a_lost_download_says_where_it_goes_on() {
    let home = tempfile::tempdir().unwrap();
    let mut first = true;
    // A packed model is not planned.
    let hub = TestHub::start(&[("f.ember", &bytes())], move |request, reply| {
        if of_file(request) && std::mem::take(&mut first) {
            reply.stops = Some((2 << 20, Duration::ZERO));
        } else if of_file(request) {
            *reply = Reply::status(503);
        }
    });
    let hub = Hub::at(&hub.address, None, PATIENCE).unwrap();
    let name = ModelName::parse(Path::new(NAME)).unwrap();
    let repo = hub.repo(&name).unwrap();
    let source = Source {
        hub: &hub,
        name: &name,
        repo: &repo,
    };
    let workload = Workload::text(Budget::Auto, None);
    let lost = pull(&source, &OwnStore::at(home.path()), workload, false);
    let message = lost.unwrap_err().to_string();
    assert!(
        message.ends_with(
            "tried 4 times; 2.0 MiB of 2.9 MiB are here; the same command goes on from there"
        ),
        "{message}"
    );
}

/// A model that is here is enough where the hub cannot be asked.
#[test]
fn a_model_that_is_here_needs_no_hub() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let pull = |hub: &str, offline: &str| {
        user(home, hub)
            .args(["pull", NAME, "--json"])
            .env("HF_HUB_OFFLINE", offline)
            .output()
            .unwrap()
    };
    let missing = pull(NOWHERE, "1");
    assert_eq!(missing.status.code(), Some(1), "{}", told(&missing));
    let path = own(home).join("o/n/demo.gguf");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, model()).unwrap();
    for (offline, why) in [("1", "HF_HUB_OFFLINE"), ("", "cannot reach 127.0.0.1:9")] {
        let here = pull(NOWHERE, offline);
        let message = told(&here);
        assert!(here.status.success(), "{message}");
        assert!(
            message.contains("o/n: demo is on this machine")
                && message.contains("was not compared with the hub")
                && message.contains(why),
            "{message}"
        );
        let here = printed(&here);
        assert_eq!(here["path"], path.display().to_string());
        assert_eq!(here["commit"], Value::Null);
    }
    // A hub that refuses was reached.
    let refuses = TestHub::start(&[], |_, reply| *reply = Reply::status(404));
    assert_eq!(pull(&refuses.address, "").status.code(), Some(1));
}

/// The bundled model, packed.
fn small_model(home: &Path) -> Vec<u8> {
    let [folder, packed] = ["demo-hf", "q4.ember"].map(|name| home.join(name));
    succeed(emberflow().args(["export", "-o"]).arg(&folder));
    let mut pack = emberflow();
    pack.arg("pack").arg(&folder).arg("-o").arg(&packed);
    succeed(pack.args(["--quant", "q4"]));
    fs::read(&packed).unwrap()
}

/// Of several files of a model on this machine, the budget decides.
#[test]
fn the_budget_chooses_among_local_files() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let folder = own(home).join(NAME);
    fs::create_dir_all(&folder).unwrap();
    // By their names, the large one comes first.
    fs::write(folder.join("demo-Q4_K_M.gguf"), model()).unwrap();
    fs::write(folder.join("demo-Q2_K.ember"), small_model(home)).unwrap();
    let plan = |file: &str| {
        let path = folder.join(file);
        let plan = succeed(user(home, NOWHERE).args(["plan", "--json"]).arg(path));
        let plan = printed(&plan);
        ["smallest_bytes", "full_bytes"].map(|name| plan[name].as_u64().unwrap())
    };
    let [of_small, of_large] = ["demo-Q2_K.ember", "demo-Q4_K_M.gguf"].map(plan);
    // The large one runs and reads, or does not run.
    let between = of_small[1] + (4 << 20);
    let below = (of_small[0] + of_small[1]) / 2;
    assert!(below < of_large[0] && of_large[0] < between && between < of_large[1] - (12 << 20));
    for (memory, wanted) in [
        (Some(between), "demo-Q2_K.ember"),
        (Some(below), "demo-Q2_K.ember"),
        (None, "demo-Q4_K_M.gguf"),
    ] {
        let memory = memory.map_or("auto".to_owned(), |bytes| format!("{bytes}B"));
        let run = |model: &Path| {
            let mut run = user(home, NOWHERE);
            run.arg("run").arg(model).args(["--memory", &memory]);
            succeed(run.args(["-p", "A vector is", "-n", "8", "--json"]))
        };
        let by_name = run(Path::new(NAME));
        let label = wanted.split('.').next().unwrap();
        let message = told(&by_name);
        assert!(
            message.contains(&format!("o/n: {label}, of 2 on this machine"))
                && message.contains("tokens/s expected"),
            "{memory}: {message}"
        );
        let by_path = run(&folder.join(wanted));
        assert_eq!(
            printed(&by_name)["logits_hash"],
            printed(&by_path)["logits_hash"]
        );
        assert!(printed(&by_path)["logits_hash"].is_string());
    }
    // Commands without a budget take the first, and say so.
    let inspected = succeed(user(home, NOWHERE).args(["inspect", NAME]));
    assert!(
        told(&inspected).contains("o/n: demo-Q4_K_M, of 2 on this machine"),
        "{}",
        told(&inspected)
    );
}

/// What a server needs besides the model counts before a download, and so does its address.
#[test]
fn a_server_is_refused_before_a_download() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let hub = hub_that_stops(Duration::from_secs(600));
    let serve = |port: u16, memory: &str| {
        let mut serve = user(home, &hub.address);
        serve.args([
            "serve",
            NAME,
            "--parallel",
            "16",
            "--memory",
            memory,
            "--port",
        ]);
        serve.arg(port.to_string());
        serve.stderr(Stdio::piped()).stdout(Stdio::piped());
        serve
    };
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let refused = serve(port, "auto").output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    let message = told(&refused);
    assert!(message.contains("cannot listen on 127.0.0.1"), "{message}");
    assert!(hub.asked().is_empty());

    // Enough for a text.
    let plan = ["plan", NAME, "--json", "--memory", "2MiB"];
    let plan = printed(&succeed(user(home, &hub.address).args(plan)));
    let text = &plan["models"][0]["forecast"]["too_large"]["smallest_bytes"];
    let text = text.as_u64().unwrap() + (8 << 20);
    let refused = serve(0, &format!("{text}B")).output().unwrap();
    let message = told(&refused);
    assert!(message.contains("no model of o/n runs here"), "{message}");
    assert!(hub.ranges("demo.gguf").iter().all(|first| *first == 0));
    assert!(!own(home).join("o/n/.partial").exists());

    // What it names is enough, and until the model is here, the page is not there.
    let needed = message.split("needs --memory ").nth(1).unwrap();
    let needed = needed.split(" or more").next().unwrap().replace(' ', "");
    drop(taken);
    let mut child = serve(port, &needed).spawn().unwrap();
    wait_for_partial(home, &mut child, PART);
    let page = TcpStream::connect(("127.0.0.1", port)).unwrap_err();
    assert_eq!(page.kind(), ErrorKind::ConnectionRefused);
    child.kill().unwrap();
    child.wait().unwrap();
    let path = own(home).join("o/n/demo.gguf");
    fs::write(&path, model()).unwrap();
    let mut child = serve(0, &needed).spawn().unwrap();
    let mut line = String::new();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    output.read_line(&mut line).unwrap();
    child.kill().unwrap();
    let ended = child.wait_with_output().unwrap();
    assert!(line.starts_with("http://"), "{}", told(&ended));
}

/// Bytes of a file that is downloaded below.
fn bytes() -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(7);
    (0..3_000_000).map(|_| random.u8(..)).collect()
}

/// How a hub changes its answers.
type Change = Box<dyn FnMut(&Request, &mut Reply) + Send>;

/// Downloads a file from a hub that fails by `rule`; the hub, and the outcome.
fn download(
    dir: &Path,
    rule: impl FnMut(&Request, &mut Reply) + Send + 'static,
) -> (TestHub, Result<(), Failure>) {
    let hub = TestHub::start(&[("f.gguf", &bytes())], rule);
    let outcome = download_from(&hub.address, dir);
    (hub, outcome)
}

/// Of a test.
const PATIENCE: Patience = Patience {
    silence: Duration::from_millis(400),
    wait: Duration::from_millis(1),
    attempts: 4,
};

fn download_from(address: &str, dir: &Path) -> Result<(), Failure> {
    let hub = Hub::at(address, Some("secret".into()), PATIENCE)?;
    let name = ModelName::parse(Path::new(NAME)).unwrap();
    let repo = hub.repo(&name)?;
    let source = Source {
        hub: &hub,
        name: &name,
        repo: &repo,
    };
    let arrived = source.download(&repo.files[0], &dir.join("partial"), &ProgressBar::hidden())?;
    arrived.publish(&dir.join("f.gguf"))
}

/// Whether this is the request for the file, and not for the list.
fn of_file(request: &Request) -> bool {
    request.path.contains("/resolve/")
}

fn arrived(dir: &Path) -> bool {
    fs::read(dir.join("f.gguf")).is_ok_and(|found| found == bytes())
}

#[test]
fn a_download_survives_what_passes() {
    let mut count = 0;
    let mut first = move || {
        count += 1;
        count == 1
    };
    let mut often = 0;
    let cases: Vec<(&str, Change)> = vec![
        (
            "the connection breaks off, again and again",
            Box::new(move |request, reply| {
                often += 1;
                if of_file(request) && often < 40 {
                    reply.stops = Some((100_000, Duration::ZERO));
                }
            }),
        ),
        (
            "silence",
            Box::new({
                let mut slow = 0;
                move |request, reply| {
                    slow += u32::from(of_file(request));
                    if slow < 3 && of_file(request) {
                        reply.stops = Some((1000, Duration::from_secs(5)));
                    }
                }
            }),
        ),
        (
            "429 and 503",
            Box::new({
                let mut busy = 0;
                move |request, reply| {
                    busy += 1;
                    if busy % 3 != 0 {
                        *reply = Reply::status(if of_file(request) { 429 } else { 503 });
                        reply.set("Retry-After", 0);
                    }
                }
            }),
        ),
        (
            "one damaged byte, once",
            Box::new(move |request, reply| {
                if of_file(request) && first() {
                    reply.body[1234] ^= 1;
                }
            }),
        ),
        (
            "ranges are ignored",
            Box::new({
                let mut broken = 0;
                move |request, reply| {
                    if of_file(request) {
                        *reply = Reply {
                            status: 200,
                            body: bytes(),
                            ..Reply::default()
                        };
                        reply.set("Content-Length", bytes().len());
                        broken += 1;
                        if broken < 3 {
                            reply.stops = Some((1_000_000, Duration::ZERO));
                        }
                    }
                }
            }),
        ),
        (
            "an answer without a length",
            Box::new(|request, reply| {
                if of_file(request) {
                    reply.headers.retain(|(name, _)| *name != "Content-Length");
                }
            }),
        ),
    ];
    for (what, rule) in cases {
        let dir = tempfile::tempdir().unwrap();
        let (hub, outcome) = download(dir.path(), rule);
        outcome.unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(arrived(dir.path()), "{what}");
        assert!(!dir.path().join("partial").exists(), "{what}");
        assert!(hub.asked().len() > 2 || what.contains("length"), "{what}");
        if what.starts_with("the connection") {
            let ranges = hub.ranges("f.gguf");
            assert!(
                ranges.is_sorted() && ranges.contains(&2_500_000),
                "{ranges:?}"
            );
        }
    }
}

#[test]
fn a_download_fails_for_what_stays_wrong() {
    // What, the answers, and what the message says.
    let cases: Vec<(&str, Change, &str)> = vec![
        (
            "a shorter file",
            Box::new(|request, reply| {
                if of_file(request) {
                    reply.body.truncate(1_000_000);
                    reply.set("Content-Length", 1_000_000);
                }
            }),
            "lists 3000000 bytes and sends 1000000",
        ),
        (
            "a longer file",
            Box::new(|request, reply| {
                if of_file(request) {
                    reply.body.push(0);
                    reply.set("Content-Length", 3_000_001);
                }
            }),
            "lists 3000000 bytes and sends 3000001",
        ),
        (
            "parts of another file",
            Box::new(|request, reply| {
                if of_file(request) && request.range.is_none() {
                    reply.stops = Some((10, Duration::ZERO));
                } else if of_file(request) {
                    reply.set("Content-Range", "bytes 10-2999999/3000001");
                }
            }),
            "sends bytes 10-2999999/3000001",
        ),
        (
            "other bytes",
            Box::new(|request, reply| {
                if of_file(request) {
                    reply.body[0] ^= 1;
                }
            }),
            "does not have the checksum",
        ),
        (
            "a page of a network that wants a login",
            Box::new(|_, reply| {
                *reply = Reply::status(200);
                reply.body = b"<html>log in</html>".to_vec();
                reply.set("Content-Length", reply.body.len());
            }),
            "does not answer as a hub of models does",
        ),
        (
            "too many requests, for good",
            Box::new(|_, reply| *reply = Reply::status(429)),
            "status 429); tried 4 times",
        ),
        (
            "no access",
            Box::new(|_, reply| *reply = Reply::status(401)),
            "its terms have to be accepted",
        ),
        (
            "no such model",
            Box::new(|_, reply| *reply = Reply::status(404)),
            "look for its name at http",
        ),
        (
            "a circle",
            Box::new(|request, reply| {
                if of_file(request) {
                    *reply = Reply::status(302);
                    reply.set("Location", request.path.clone());
                }
            }),
            "redirects in a circle",
        ),
        (
            "one byte from time to time",
            Box::new(|request, reply| {
                if of_file(request) {
                    reply.drips = true;
                }
            }),
            "sends almost nothing",
        ),
        (
            "silence, for good",
            Box::new(|request, reply| {
                if of_file(request) {
                    reply.stops = Some((0, Duration::from_secs(5)));
                }
            }),
            "broke off",
        ),
        (
            "the connection is closed at once",
            Box::new(|request, reply| {
                if of_file(request) {
                    reply.stops = Some((0, Duration::ZERO));
                }
            }),
            "tried 4 times",
        ),
    ];
    for (what, rule, wanted) in cases {
        let dir = tempfile::tempdir().unwrap();
        let (_, outcome) = download(dir.path(), rule);
        let message = outcome.expect_err(what).to_string();
        assert!(message.contains(wanted), "{what}: {message}");
        assert!(!dir.path().join("f.gguf").exists(), "{what}");
        if what == "other bytes" {
            assert!(
                !dir.path().join("partial").exists(),
                "it would be taken for the beginning"
            );
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let message = download_from(NOWHERE, dir.path()).unwrap_err().to_string();
    assert!(
        message.contains("cannot reach 127.0.0.1:9") && message.contains("HF_ENDPOINT"),
        "{message}"
    );
}

/// The token goes to the hub, and not to where it redirects.
#[test]
fn redirects_do_not_get_the_token() {
    let elsewhere = TestHub::start(&[("f.gguf", &bytes())], |_, _| ());
    let to = elsewhere.address.clone();
    let dir = tempfile::tempdir().unwrap();
    let (hub, outcome) = download(dir.path(), move |request, reply| {
        if of_file(request) {
            *reply = Reply::status(302);
            reply.set("Location", format!("{to}{}", request.path));
        }
    });
    outcome.unwrap();
    assert!(arrived(dir.path()));
    let tokens = |hub: &TestHub| {
        hub.asked()
            .into_iter()
            .map(|request| request.token)
            .collect::<Vec<_>>()
    };
    assert!(
        tokens(&hub)
            .iter()
            .all(|token| token.as_deref() == Some("Bearer secret"))
    );
    assert_eq!(tokens(&elsewhere), [None]);
}

/// A beginning of an earlier attempt that was damaged on disk costs a second download, no wrong file.
#[test]
fn a_damaged_beginning_is_downloaded_again() {
    for beginning in [
        vec![0; 1_000_000],
        vec![0; 4_000_000],
        bytes()[..2_000_000].to_vec(),
    ] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("partial"), &beginning).unwrap();
        let (hub, outcome) = download(dir.path(), |_, _| ());
        outcome.unwrap();
        assert!(arrived(dir.path()));
        let ranges = hub.ranges("f.gguf");
        match beginning.len() {
            1_000_000 => assert_eq!(ranges, [1_000_000, 0]),
            2_000_000 => assert_eq!(ranges, [2_000_000]),
            _ => assert_eq!(ranges, [0]),
        }
    }
}

/// Lists that lie: a file longer than the disk, names that lead elsewhere, and repositories without a model.
#[test]
fn lists_that_lie_do_no_harm() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let pull = |hub: &TestHub| {
        user(home, &hub.address)
            .args(["pull", "o/n:f"])
            .output()
            .unwrap()
    };
    let edit = |from: &'static str, to: &'static str| {
        move |request: &Request, reply: &mut Reply| {
            if !of_file(request) {
                let text = String::from_utf8(reply.body.clone()).unwrap();
                assert!(text.contains(from), "{text}");
                reply.body = text.replace(from, to).into_bytes();
                reply.set("Content-Length", reply.body.len());
            }
        }
    };
    for (length, wanted) in [
        ("8796093022208", "to download, but the disk of"),
        ("1125899906842624", "more than the file system takes"),
    ] {
        let long = TestHub::start(&[("f.gguf", model())], edit("42753152", length));
        let message = told(&pull(&long));
        assert!(message.contains(wanted), "{message}");
    }
    let climbing = TestHub::start(&[("f.gguf", model())], edit("f.gguf", "../../../../f.gguf"));
    let message = told(&pull(&climbing));
    assert!(
        message.contains("has no model that emberflow reads"),
        "{message}"
    );
    let commit = TestHub::start(&[("f.gguf", model())], edit(COMMIT, "../../x"));
    assert!(told(&pull(&commit)).contains("is not a hash of git"));
    let nothing = TestHub::start(&[("pytorch_model.bin", model())], |_, _| ());
    assert!(told(&pull(&nothing)).contains("only pytorch_model.bin"));
    assert!(!home.join("f.gguf").exists() && !home.join(".local/share/f.gguf").exists());
}

/// A model in the layout of each program that keeps models.
#[test]
fn models_of_other_programs_are_found() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let put = |path: &str, bytes: &[u8]| {
        let path = home.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    // Hugging Face: links to blobs.
    let repo = ".cache/huggingface/hub/models--hf--some--model";
    put(&format!("{repo}/blobs/aa"), model());
    put(&format!("{repo}/refs/main"), COMMIT.as_bytes());
    let snapshot = home.join(repo).join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    std::os::unix::fs::symlink("../../blobs/aa", snapshot.join("m-Q8_0.gguf")).unwrap();
    std::os::unix::fs::symlink("../../blobs/gone", snapshot.join("m-Q4_0.gguf")).unwrap();
    // ollama: a manifest and a blob.
    let digest = "ab".repeat(32);
    let manifest = serde_json::json!({"schemaVersion": 2, "layers": [
        {"mediaType": "application/vnd.ollama.image.model", "digest": format!("sha256:{digest}"), "size": model().len()},
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00", "size": 1},
    ]});
    let manifest = manifest.to_string();
    let library = ".ollama/models/manifests/registry.ollama.ai/library";
    put(&format!(".ollama/models/blobs/sha256-{digest}"), model());
    put(&format!("{library}/tiny/latest"), manifest.as_bytes());
    put(&format!("{library}/broken/latest"), b"{");
    put(
        &format!("{library}/evil/latest"),
        manifest.replace(&digest, "../../../secret").as_bytes(),
    );
    put(
        ".ollama/models/manifests/hf.co/ol/tiny-GGUF/Q8_0",
        manifest.as_bytes(),
    );
    // LM Studio, and llama.cpp.
    put(".lmstudio/models/lm/studio-GGUF/s-Q8_0.gguf", model());
    put(".lmstudio/models/lm/studio-GGUF/mmproj-s.gguf", b"GGUF");
    put(".lmstudio/models/lm/half/h-00001-of-00002.gguf", b"GGUF");
    put(".cache/llama.cpp/ll_a-GGUF_a-Q8_0.gguf", model());
    put(".cache/llama.cpp/ll_odd_odd-Q8_0.gguf", model());
    put(".cache/llama.cpp/manifest=ll=odd=latest.json", b"{}");

    let listed = printed(&succeed(user(home, NOWHERE).args(["list", "--json"])));
    let mut found: Vec<String> = (listed.as_array().unwrap().iter())
        .map(|model| {
            format!("{} {}:{}", model["store"], model["name"], model["file"]).replace('"', "")
        })
        .collect();
    found.sort();
    assert_eq!(
        found,
        [
            "huggingface hf/some--model:m-Q8_0",
            "llama.cpp ll/a-GGUF:a-Q8_0",
            "llama.cpp ll/odd:odd-Q8_0",
            "lmstudio lm/studio-GGUF:s-Q8_0",
            "ollama library/tiny:latest",
            "ollama ol/tiny-GGUF:Q8_0",
        ]
    );
    for name in [
        "hf/some--model",
        "ll/a-GGUF",
        "ll/odd:Q8_0",
        "lm/studio-GGUF:q8_0",
        "tiny",
        "tiny:latest",
        "ol/tiny-GGUF",
        "OL/Tiny-gguf:Q8_0",
    ] {
        let ran = succeed(user(home, NOWHERE).args([
            "run",
            name,
            "-p",
            "A vector is",
            "-n",
            "4",
            "--json",
        ]));
        assert!(printed(&ran)["text"].is_string(), "{name}");
    }
    let plain = succeed(user(home, NOWHERE).arg("list"));
    let plain = String::from_utf8(plain.stdout).unwrap();
    assert_eq!(plain.lines().count(), 6, "{plain}");
    // They are not removed.
    for name in ["hf/some--model", "lm/studio-GGUF", "tiny"] {
        let refused = user(home, NOWHERE).args(["remove", name]).output().unwrap();
        assert!(
            told(&refused).contains("was not downloaded by 'emberflow pull'"),
            "{}",
            told(&refused)
        );
    }
    assert!(snapshot.join("m-Q8_0.gguf").exists());
}

/// A store with files of `o/n` that were downloaded.
fn store_with(root: &Path, files: &[(&str, &str)]) -> (OwnStore, ModelName) {
    let store = OwnStore::at(root);
    let name = ModelName::parse(Path::new(NAME)).unwrap();
    put(&store, &name, files, |_| Ok(())).unwrap();
    (store, name)
}

/// Publishes files with these bytes, with `last` before the end.
fn put(
    store: &OwnStore,
    name: &ModelName,
    files: &[(&str, &str)],
    last: impl FnOnce(&Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let partial = store.partial(name, "", "sha256:0");
    let fresh = partial.parent().unwrap().to_owned();
    fs::create_dir_all(&fresh).unwrap();
    let downloaded = files.iter().enumerate().map(|(at, (path, bytes))| {
        fs::write(fresh.join(at.to_string()), bytes).unwrap();
        DownloadedFile {
            path: (*path).to_owned(),
            bytes: bytes.len() as u64,
            modified: modified(&fresh.join(at.to_string()).metadata().unwrap()),
            checksum: format!("sha256:{bytes}"),
            hub: "h".to_owned(),
            commit: COMMIT.to_owned(),
        }
    });
    store.publish(
        name,
        downloaded.collect(),
        |_| false,
        |folder| {
            last(folder)?;
            for (at, (path, _)) in files.iter().enumerate() {
                let path = folder.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::rename(fresh.join(at.to_string()), path).unwrap();
            }
            Ok(())
        },
    )
}

/// Only what is in the list is removed, and only as it was downloaded.
#[test]
fn a_changed_file_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let files = [
        ("a-Q4_0.gguf", "1234"),
        ("sub/b-Q8_0.gguf", "1234"),
        ("c-F16.gguf", "1234"),
        ("c2-F16.gguf", "1234"),
    ];
    let (store, name) = store_with(dir.path(), &files);
    let folder = store.folder_of(&name);
    // another length, and the same length
    fs::write(folder.join("c-F16.gguf"), "12345").unwrap();
    std::thread::sleep(Duration::from_millis(20));
    fs::write(folder.join("c2-F16.gguf"), "4321").unwrap();
    let of = |text: &str| ModelName::parse(Path::new(text)).unwrap();
    let several = store.remove(&of("o/n:F16")).unwrap_err().to_string();
    assert!(several.contains("c-F16, c2-F16"), "{several}");
    assert!(store.remove(&of("o/n:it")).unwrap().files.is_empty());
    assert_eq!(
        store.remove(&of("O/N:Q8_0")).unwrap().files,
        [folder.join("sub/b-Q8_0.gguf")]
    );
    assert!(!folder.join("sub").exists() && folder.join("a-Q4_0.gguf").exists());
    let all = store.remove(&name).unwrap();
    assert_eq!(all.files, [folder.join("a-Q4_0.gguf")]);
    assert_eq!(
        all.changed,
        [folder.join("c-F16.gguf"), folder.join("c2-F16.gguf")]
    );
    assert!(store.downloaded(&name).unwrap().is_empty());
    assert!(folder.join("c-F16.gguf").exists() && folder.join("c2-F16.gguf").exists());
}

/// An update that ends in the middle leaves no model that runs, and the next one completes it; a file that the user put
/// there is never replaced.
#[test]
fn an_update_that_stops_is_completed() {
    let dir = tempfile::tempdir().unwrap();
    let (store, name) = store_with(dir.path(), &[("a.gguf", "old1"), ("b.gguf", "old2")]);
    let folder = store.folder_of(&name);
    std::thread::sleep(Duration::from_millis(20));
    let stops = put(
        &store,
        &name,
        &[("a.gguf", "new1"), ("b.gguf", "new2")],
        |folder| {
            // one file has its new name
            fs::rename(folder.join(".partial/0"), folder.join("a.gguf")).unwrap();
            Err(Failure::Interrupted)
        },
    );
    assert!(stops.is_err());
    let listed = |store: &OwnStore| {
        let listed = store.downloaded(&name).unwrap();
        let here = listed.into_iter().filter(|file| file.is_in(&folder));
        here.map(|file| file.checksum).collect::<Vec<_>>()
    };
    // By their times: the old b, and the new a.
    let mut both = listed(&store);
    both.sort();
    assert_eq!(both, ["sha256:new1", "sha256:old2"]);
    let listing = || {
        let mut list = emberflow();
        let list = list
            .args(["list", "--json"])
            .env("EMBERFLOW_MODELS", dir.path())
            .env("HOME", dir.path());
        let all = printed(&succeed(list.env("OLLAMA_MODELS", dir.path())));
        all.as_array()
            .unwrap()
            .iter()
            .filter(|model| model["store"] == "emberflow")
            .count()
    };
    assert_eq!(listing(), 0);
    put(&store, &name, &[("b.gguf", "new2")], |_| Ok(())).unwrap();
    assert_eq!(listing(), 2);
    assert_eq!(listed(&store), ["sha256:new1", "sha256:new2"]);
    // It may also end when all have their names.
    let stops = put(&store, &name, &[("a.gguf", "newer")], |folder| {
        fs::rename(folder.join(".partial/0"), folder.join("a.gguf")).unwrap();
        Err(Failure::Interrupted)
    });
    assert!(stops.is_err() && store.is_unfinished(&name) && listing() == 0);
    store
        .publish(&name, Vec::new(), |_| false, |_| Ok(()))
        .unwrap();
    assert!(!store.is_unfinished(&name) && listing() == 2);
    assert_eq!(store.downloaded(&name).unwrap().len(), 2);
    std::thread::sleep(Duration::from_millis(20));
    fs::write(folder.join("a.gguf"), "mine").unwrap();
    let refused = put(&store, &name, &[("a.gguf", "new3")], |_| Ok(()))
        .unwrap_err()
        .to_string();
    assert!(refused.contains("move it away first"), "{refused}");
    assert_eq!(fs::read(folder.join("a.gguf")).unwrap(), b"mine");
    // A list that was damaged is not written over.
    fs::write(folder.join("emberflow.json"), "[{").unwrap();
    assert!(put(&store, &name, &[("c.gguf", "c")], |_| Ok(())).is_err());
    assert!(store.remove(&name).is_err());
}

/// A process that removes a model leaves the download of another one alone.
#[test]
fn a_running_download_is_not_removed() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let hub = hub_that_stops(Duration::from_secs(2));
    let mut child = user(home, &hub.address)
        .args(["pull", NAME])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for_partial(home, &mut child, 0);
    let refused = user(home, NOWHERE).args(["remove", NAME]).output().unwrap();
    assert!(
        told(&refused).contains("no such model"),
        "{}",
        told(&refused)
    );
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read(own(home).join("o/n/demo.gguf")).unwrap(), model());
}
