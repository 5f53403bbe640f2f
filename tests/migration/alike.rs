//! What the service lets pass and denies, the rules let pass and deny; and where they differ, they differ as the page says.

use serde_json::json;

use crate::example::{With, World, batch, get, request, rules, send, statuses, yaml};
use crate::ratelimit::{Asked, Service};
use crate::support::envoy::Envoy;
use crate::support::http::Request;
use crate::support::project::read;

/// The list of requests, each with the rule that it is for: some that pass and some that do not, and others that must not
/// count with them.
fn list() -> Vec<(&'static str, Request)> {
    let mut list = Vec::new();
    let mut add = |rule, number: usize, request: Request| list.extend(std::iter::repeat_n((rule, request), number));
    // Ten an hour for each address, whatever the client itself writes into the header; the office is free.
    add("per-ip", 12, get(1, "/"));
    add("per-ip", 3, get(2, "/"));
    add("per-ip", 1, Request::get("/").with("x-forwarded-for", "192.0.2.77, 198.51.100.1"));
    add("per-ip", 14, Request::get("/").with("x-forwarded-for", "203.0.113.9"));
    // Four a day for each key, from wherever it comes; seven for one of them; three for all trial keys together.
    for client in 10..16 {
        add("per-key", 1, get(client, "/").with("x-api-key", "blue"));
    }
    add("per-key", 2, get(16, "/").with("x-api-key", "green"));
    add("per-key", 8, get(17, "/").with("x-api-key", "gold"));
    for key in ["trial-1", "trial-1", "trial-2", "trial-3", "trial-1"] {
        add("trials", 1, get(18, "/").with("x-api-key", key));
    }
    add("trials", 1, get(18, "/"));
    // Two attempts to log in an hour for each address; looking at the page is none.
    add("login", 4, request("POST", 20, "/login"));
    add("login", 3, get(20, "/login"));
    add("login", 1, request("POST", 21, "/login"));
    add("login", 1, request("POST", 20, "/logout"));
    // Searches for one thing are watched.
    for client in 30..34 {
        add("searches", 1, get(client, "/?q=shoes"));
    }
    add("searches", 1, get(34, "/?page=2&q=hats"));
    // An export counts five, and everybody together has ten a day.
    for client in 40..44 {
        add("export", 1, get(client, "/export/all"));
    }
    // A batch counts what it says, and each address has twenty a day; without the header it counts nothing.
    for size in ["15", "5", "1"] {
        add("batch", 1, batch(50, size));
    }
    add("batch", 1, get(50, "/batch"));
    add("batch", 1, batch(51, "21"));
    add("batch", 1, batch(52, "20"));
    // Two an hour for the routes of a tier; three for each cluster.
    for client in 60..64 {
        add("tier", 1, get(client, "/report/daily"));
    }
    for client in 70..75 {
        add("per-cluster", 1, get(client, "/pay"));
    }
    add("per-cluster", 2, get(75, "/ship"));
    list
}

/// Sends the requests of the list; the statuses of the answers.
fn sent(envoy: &Envoy) -> Vec<u16> {
    statuses(&send(envoy, &list().into_iter().map(|(_, request)| request).collect::<Vec<_>>()))
}

/// The requests of the list that the two answered with different statuses, each with the rule that it is for.
fn differing(service: &[u16], meshquota: &[u16]) -> Vec<(&'static str, String)> {
    let answers = list().into_iter().zip(service.iter().zip(meshquota));
    let differing = answers.filter(|(_, (service, meshquota))| service != meshquota);
    differing
        .map(|((rule, request), (service, meshquota))| {
            let head = String::from_utf8(request.head()).unwrap().replace("\r\n", " ");
            (rule, format!("{head}: {service} from the service, {meshquota} from meshquota"))
        })
        .collect()
}

#[test]
fn the_service_and_the_rules_decide_alike_on_a_list_of_requests() {
    let world = World::start();
    let (before, after) = (world.envoy(With::Service, &rules()), world.envoy(With::Meshquota, &rules()));
    let (by_service, by_rules) = (sent(&before), sent(&after));
    assert_eq!(differing(&by_service, &by_rules), []);

    // Nothing is shown by requests that pass by a limit: each let some pass, and each but the unlimited one denied some.
    let decided = world.service.decided();
    assert_eq!(decided.len(), 10, "{decided:?}");
    assert!(decided.values().all(|[passed, over]| *passed > 0 && *over > 0), "{decided:?}");
    let names = names();
    assert_eq!(names.len(), 9);
    for name in names {
        let denied = if name == "searches" { "shadow_deny" } else { "deny" };
        for outcome in ["allow", denied] {
            after.wait_for_count(&format!("{name} {outcome}"), |count| count > 0);
        }
    }
    assert_eq!(by_service.iter().filter(|status| **status == 429).count(), 18);
    before.finish();
    after.finish();
}

/// The names of the rules.
fn names() -> Vec<String> {
    let rules = rules();
    rules["rules"].as_array().unwrap().iter().map(|rule| rule["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_limit_that_is_not_the_same_is_noticed_whichever_it_is() {
    let world = World::start();
    let mut changed = rules();
    for rule in changed["rules"].as_array_mut().unwrap() {
        if rule["name"] == "searches" {
            rule["shadow"] = json!(false);
        } else {
            let more = rule["cost"].as_u64().unwrap_or(1);
            let capacity = &mut rule["limits"][0]["capacity"];
            *capacity = json!(capacity.as_u64().unwrap() + more);
        }
    }
    let (before, after) = (world.envoy(With::Service, &rules()), world.envoy(With::Meshquota, &changed));
    let differing = differing(&sent(&before), &sent(&after));
    // Requests that are for one rule have clients of their own, so what differs there is due to that rule.
    for name in names() {
        assert!(
            differing.iter().any(|(rule, _)| *rule == name),
            "{name} was changed, and nothing shows it: {differing:?}"
        );
    }
    before.finish();
    after.finish();
}

#[test]
fn rules_that_watch_beside_the_service_say_of_each_request_what_it_decides() {
    let world = World::start();
    let mut watching = rules();
    for rule in watching["rules"].as_array_mut().unwrap() {
        rule["shadow"] = json!(true);
    }
    let envoy = world.envoy(With::Both, &watching);
    let statuses = sent(&envoy);
    let log = envoy.wait_for_access_log(statuses.len());
    let page = read("docs/migrate-from-ratelimit.md");
    let command = page.lines().map(str::trim).find(|line| line.starts_with("awk ")).expect("the page compares by awk");
    // What the command prints, and no more, are searches, which the service only watches too.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("access.log"), log.join("\n")).unwrap();
    let output = std::process::Command::new("sh").args(["-c", command]).current_dir(folder.path()).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.lines().count() == 2 && printed.lines().all(|line| line.contains("rule=searches")), "{printed}");
    // The service denies as ever, and the quota headers are its own.
    assert_eq!(statuses.iter().filter(|status| **status == 429).count(), 18);
    assert_eq!(envoy.client().exchange(&get(80, "/")).header("x-ratelimit-limit").as_deref(), Some("10, 10;w=3600"));
    envoy.wait_for_count("per-key shadow_deny", |count| count == 3);
    envoy.finish();
}

/// How the two answer requests on which they differ by design.
struct Difference {
    what: &'static str,
    /// The requests; `None`: the hour ends.
    requests: Vec<Option<Request>>,
    service: &'static [u16],
    meshquota: &'static [u16],
}

fn differences() -> Vec<Difference> {
    let times = |number: usize, request: Request| std::iter::repeat_n(Some(request), number);
    let by_ipv6 = |last: u8| Request::get("/").with("x-forwarded-for", format!("2001:db8::{last}"));
    vec![
        Difference {
            what: "a window that ends hands out the whole limit again, a bucket what has been refilled",
            requests: times(10, get(1, "/")).chain([None]).chain(times(2, get(1, "/"))).collect(),
            service: &[200, 200, 200, 200, 200, 200, 200, 200, 200, 200, 200, 200],
            meshquota: &[200, 200, 200, 200, 200, 200, 200, 200, 200, 200, 429, 429],
        },
        Difference {
            what: "a request that one limit denies counts in the others, and costs nothing here",
            requests: times(10, request("POST", 2, "/login")).chain(times(1, get(2, "/"))).collect(),
            service: &[200, 200, 429, 429, 429, 429, 429, 429, 429, 429, 429],
            meshquota: &[200, 200, 429, 429, 429, 429, 429, 429, 429, 429, 200],
        },
        Difference {
            what: "hits that do not fit are counted all the same, and here they leave what is there",
            requests: ["15", "10", "5"].map(|size| Some(batch(3, size))).to_vec(),
            service: &[200, 429, 429],
            meshquota: &[200, 429, 200],
        },
        Difference {
            what: "hits that are no number count nothing, and here the default",
            requests: times(1, batch(4, "20")).chain(times(1, batch(4, "many"))).collect(),
            service: &[200, 200],
            meshquota: &[200, 429],
        },
        Difference {
            what: "a path that is written otherwise passes by an action on :path, and not by a rule",
            requests: ["/login?x=1", "//login", "/%6Cogin"].map(|path| Some(request("POST", 5, path))).to_vec(),
            service: &[200, 200, 200],
            meshquota: &[200, 200, 429],
        },
        Difference {
            what: "each IPv6 address is a client, and here each /64",
            requests: times(10, by_ipv6(1)).chain(times(1, by_ipv6(2))).collect(),
            service: &[200, 200, 200, 200, 200, 200, 200, 200, 200, 200, 200],
            meshquota: &[200, 200, 200, 200, 200, 200, 200, 200, 200, 200, 429],
        },
        Difference {
            what: "a blank header is a value like any other, and here none",
            requests: times(5, get(6, "/").with("x-api-key", "")).collect(),
            service: &[200, 200, 200, 200, 429],
            meshquota: &[200, 200, 200, 200, 200],
        },
    ]
}

#[test]
fn where_they_differ_by_design_they_differ_as_the_page_says() {
    let world = World::start();
    let (before, after) = (world.envoy(With::Service, &rules()), world.envoy(With::Meshquota, &rules()));
    for Difference { what, requests, service, meshquota } in differences() {
        for (envoy, expected) in [(&before, service), (&after, meshquota)] {
            let mut client = envoy.client();
            let mut found = Vec::new();
            for request in &requests {
                match request {
                    Some(request) => found.push(client.exchange(request).status()),
                    None => world.service.advance(3_600),
                }
            }
            assert_eq!(found, expected, "{what}");
        }
    }
    before.finish();
    after.finish();
}

#[test]
fn a_client_is_told_in_the_headers_that_the_page_shows() {
    let world = World::start();
    let (before, after) = (world.envoy(With::Service, &rules()), world.envoy(With::Meshquota, &rules()));
    let list = vec![get(1, "/"); 11];
    let told = |envoy: &Envoy| {
        let denied = send(envoy, &list).pop().unwrap();
        let names = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-envoy-ratelimited"];
        let mut told = names.map(|name| denied.header(name).unwrap()).to_vec();
        told.push(denied.header("retry-after").map_or("none".to_owned(), |_| "seconds".to_owned()));
        told.push(denied.text());
        told
    };
    assert_eq!(told(&before), ["10, 10;w=3600", "0", "true", "none", ""]);
    assert_eq!(told(&after), ["10", "0", "true", "seconds", "rate limit exceeded\n"]);
    before.finish();
    after.finish();
}

/// The stand-in is the half of the comparison that is not real, so it is held to what the service documents.
#[test]
fn the_stand_in_looks_descriptors_up_as_the_service_documents() {
    let configuration = yaml(
        "
        domain: documented
        descriptors:
        - {key: user, rate_limit: {unit: hour, requests_per_unit: 2}}
        - {key: user, value: root, rate_limit: {unit: hour, requests_per_unit: 1}}
        - {key: user, value: nobody, rate_limit: {unit: hour, requests_per_unit: 0}}
        - {key: file, value: tmp-*, rate_limit: {unit: hour, requests_per_unit: 1}}
        - {key: file, value: var-*, share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 1}}
        - key: kind
          value: mail
          descriptors:
          - {key: to, rate_limit: {unit: second, requests_per_unit: 1}}
        - {key: free, rate_limit: {unlimited: true}}
        - {key: tried, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 1}}
        ",
    );
    let asked = |entries: &str, hits: u64| {
        let entry = |entry: &str| entry.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).unwrap();
        Asked { entries: entries.split(' ').map(entry).collect(), hits }
    };
    // Each case begins with no counter: the descriptors of a call, hits, and how many of three such calls pass.
    let cases: &[(&[&str], u64, usize)] = &[
        (&["user=anne"], 1, 2),
        (&["user=anne"], 2, 1),
        (&["user=root"], 1, 1),
        (&["user=nobody"], 1, 0),
        (&["user=anne", "user=root"], 1, 1),
        (&["nothing=known"], 1, 3),
        (&["file=tmp-1"], 1, 1),
        (&["file=other"], 1, 3),
        // As many entries as levels: neither fewer nor more find a limit.
        (&["kind=mail to=a"], 1, 1),
        (&["kind=mail"], 1, 3),
        (&["user=anne to=a"], 1, 3),
        (&["to=a kind=mail"], 1, 3),
        (&["free=1"], 1, 3),
        (&["tried=1"], 1, 3),
    ];
    for (descriptors, hits, expected) in cases {
        let service = Service::start(&configuration);
        let descriptors = descriptors.iter().map(|entries| asked(entries, *hits)).collect::<Vec<_>>();
        let passed = (0..3).filter(|_| service.allows(&descriptors)).count();
        assert_eq!(passed, *expected, "{descriptors:?}");
    }
    // What a wildcard matches is counted apart, or together where it shares its threshold; a window ends.
    let service = Service::start(&configuration);
    let allows = |entries: &str| service.allows(&[asked(entries, 1)]);
    assert!(allows("file=tmp-1") && allows("file=tmp-2"));
    assert!(allows("file=var-1") && !allows("file=var-2"));
    assert!(allows("kind=mail to=a") && allows("kind=mail to=b") && !allows("kind=mail to=b"));
    service.advance(1);
    assert!(allows("kind=mail to=b") && !allows("file=tmp-1"));
}
