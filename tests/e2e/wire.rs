//! Replies that are cut, delayed, garbled or lost on the way.
//!
//! What holds in each case: a request that could not be decided is let through and never denied, no reply goes to
//! another request than its own, and what the bucket holds in the end is its capacity less one for each call that
//! reached the server.

use std::time::Duration;

use redis::Commands;

use crate::support::app::App;
use crate::support::envoy::{Envoy, Setup};
use crate::support::http::{Request, at_once, at_once_from_each, with_status};
use crate::support::server::{Kind, Server, wait_until};
use crate::support::shim::{Mode, Shim};
use crate::{KEY, is_waved_through, quota, slow};

const CAPACITY: u64 = 1000;
/// Long enough for a busy machine to answer within it, mostly.
const TIMEOUT: &str = "300ms";

/// A server, a shim, a service and an Envoy, after the first decision.
struct Scene {
    redis: Server,
    shim: Shim,
    app: App,
    envoy: Envoy,
}

impl Scene {
    fn set(timeout: &str) -> Self {
        let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
        let shim = Shim::before(redis.port());
        let envoy = Setup::new(shim.port(), &app).configuration(slow(CAPACITY, timeout)).start();
        let scene = Self { redis, shim, app, envoy };
        scene.recover();
        scene.envoy.wait_for_count("calls ok", |times| times >= 1);
        scene
    }

    /// Sends requests until one is decided, and checks that it was told the truth.
    fn recover(&self) {
        wait_until("a request is decided by Redis again", || match quota(&self.envoy.get("/")) {
            Some((limit, left)) => {
                assert_eq!((limit, left), (CAPACITY, self.left()), "it was told of another request");
                true
            }
            None => false,
        });
    }

    /// What the bucket holds.
    fn left(&self) -> u64 {
        let tokens: String = self.redis.client().hget(KEY, "tokens").unwrap();
        tokens.split('.').next().unwrap().parse().unwrap()
    }

    /// The end of every scene: decisions are right again, and all calls that reached the server are charged once.
    fn close(self) {
        self.shim.set(Mode::Pass);
        self.recover();
        let before = self.left();
        for nth in 1..=10 {
            // One after the other, so each is told of itself or of nothing, where the machine is slow.
            let told = quota(&self.envoy.get("/"));
            assert!(told.is_none() || told == Some((CAPACITY, before - nth)), "{told:?} after {before}");
        }
        wait_until("every call that was sent has been charged once", || {
            self.left() == CAPACITY - self.shim.charges(KEY) as u64
        });
        assert_eq!(self.envoy.count("per-ip deny"), 0);
        self.envoy.finish();
    }
}

#[test]
fn a_reply_that_is_cut_in_the_middle_fails_its_request_and_is_not_asked_for_again() {
    for after in [0, 1, 4, 5, 9] {
        let scene = Scene::set("5s");
        let sent = scene.shim.count("EVALSHA");
        scene.shim.set(Mode::Cut(after));
        assert!(is_waved_through(&scene.envoy.get("/")), "cut after {after} bytes");
        assert_eq!(scene.shim.count("EVALSHA"), sent + 1, "a call that may have been charged is sent once");
        scene.envoy.wait_for_count("per-ip fail_allow", |times| times == 1);
        scene.envoy.wait_for_count("errors unavailable", |times| times == 1);
        assert_eq!(scene.envoy.count("calls ok"), 1);
        scene.close();
    }
}

#[test]
fn replies_that_come_byte_by_byte_mean_the_same() {
    let scene = Scene::set("5s");
    scene.shim.set(Mode::Bytewise);
    let responses = at_once(scene.envoy.ingress(), 20, &Request::get("/"));
    let told = responses.iter().map(|response| quota(response).expect("a decision").1).collect::<Vec<_>>();
    assert_eq!((told.iter().max(), told.iter().min()), (Some(&(CAPACITY - 2)), Some(&(CAPACITY - 21))), "{told:?}");
    scene.close();
}

#[test]
fn replies_that_are_slow_but_in_time_are_waited_for() {
    let scene = Scene::set("5s");
    scene.shim.set(Mode::Delay(Duration::from_millis(200)));
    let responses = at_once_from_each(scene.envoy.ingress(), 20, &Request::get("/"));
    assert!(responses.iter().all(|response| quota(response).is_some()));
    scene.envoy.wait_for_count("calls ok", |times| times == 21);
    assert_eq!(scene.envoy.count("calls timeout"), 0);
    scene.close();
}

#[test]
fn a_reply_past_its_deadline_is_thrown_away_and_not_given_to_the_next_request() {
    let scene = Scene::set(TIMEOUT);
    scene.shim.set(Mode::Hold);
    let mut client = scene.envoy.client();
    for _ in 0..3 {
        assert!(is_waved_through(&client.get("/")));
    }
    scene.envoy.wait_for_count("calls timeout", |times| times >= 3);
    let late = scene.envoy.count("calls late");
    scene.shim.set(Mode::Pass);
    // Three answers lie before that of the next request, unless the stream was given up meanwhile.
    scene.recover();
    scene.envoy.wait_for_count("calls late", |times| times == late + 3 || scene.envoy.count("reconnects") > 0);
    assert_eq!(scene.envoy.count("calls late"), late + 3, "the stream was given up too soon");
    scene.close();
}

#[test]
fn replies_that_are_always_late_deny_nobody() {
    let scene = Scene::set("100ms");
    scene.shim.set(Mode::Delay(Duration::from_millis(400)));
    let responses = at_once_from_each(scene.envoy.ingress(), 20, &Request::get("/"));
    assert!(responses.iter().all(is_waved_through));
    scene.envoy.wait_for_count("calls late", |times| times >= 20);
    scene.close();
}

#[test]
fn half_a_reply_and_then_silence_ends_in_a_new_connection() {
    for after in [1, 4, 9] {
        let scene = Scene::set("100ms");
        let connections = scene.shim.accepted();
        scene.shim.set(Mode::Half(after));
        assert!(is_waved_through(&scene.envoy.get("/")));
        scene.envoy.wait_for_count("calls timeout", |times| times >= 1);
        // The connection there is stays silent.
        scene.shim.set(Mode::Pass);
        scene.recover();
        assert_eq!(scene.shim.accepted(), connections + 1);
        scene.envoy.wait_for_count("reconnects", |times| times == 1);
        scene.close();
    }
}

#[test]
fn garbage_in_place_of_a_reply_fails_the_request_and_the_connection() {
    let nested = b"*1\r\n".repeat(20_000);
    let endless = [&b"$16000000\r\n"[..], &[b'a'; 100_000]].concat();
    let cases: &[(&str, &[u8])] = &[
        ("HTTP", b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        ("zeros", &[0; 32]),
        ("bytes that are not text", b"\xff\xfe\xfd\r\n"),
        ("RESP3", b"%1\r\n+a\r\n:1\r\n"),
        ("a list 20,000 deep", &nested),
        ("an endless text", &endless),
        ("a status", b"+OK\r\n"),
        ("nothing", b"$-1\r\n"),
        ("a list of nothing", b"*0\r\n"),
        ("too few integers", b"*3\r\n:1\r\n:9\r\n:0\r\n"),
        ("texts instead of integers", b"*4\r\n$1\r\n1\r\n$1\r\n9\r\n$1\r\n0\r\n$1\r\n0\r\n"),
        ("more granted than asked for", b"*4\r\n:7\r\n:9\r\n:0\r\n:0\r\n"),
        ("a limit that is not there", b"*5\r\n:1\r\n:9\r\n:0\r\n:0\r\n:9\r\n"),
        ("a negative number", b"*4\r\n:0\r\n:-9\r\n:1\r\n:1\r\n"),
        ("an integer that is none", b"*1\r\n:x\r\n"),
        ("no proper end of line", b":1\n"),
    ];
    let scene = Scene::set("5s");
    for (nth, (what, garbage)) in (1..).zip(cases) {
        scene.shim.set(Mode::Garbage(garbage.to_vec()));
        let response = scene.envoy.get("/");
        assert!(is_waved_through(&response), "{what}: {:?}", response.headers);
        scene.envoy.wait_for_count("errors protocol", |times| times == nth);
        assert_eq!(scene.envoy.count("per-ip fail_allow"), nth, "{what}");
        scene.shim.set(Mode::Pass);
        let waved = scene.app.count();
        scene.recover();
        assert_eq!(scene.app.count(), waved + 1, "{what}: the next request finds a new connection");
    }
    scene.close();
}

#[test]
fn a_reply_that_nobody_asked_for_ends_the_connection_before_it_can_answer_the_wrong_request() {
    let scene = Scene::set("5s");
    // The request's own reply, and two more: of a bucket that is empty.
    let answer = b"*4\r\n:1\r\n:500\r\n:0\r\n:1000\r\n*4\r\n:0\r\n:0\r\n:60000\r\n:60000\r\n".to_vec();
    scene.shim.set(Mode::Garbage(answer));
    assert_eq!(quota(&scene.envoy.get("/")), Some((CAPACITY, 500)));
    scene.shim.set(Mode::Pass);
    scene.recover();
    scene.envoy.wait_for_count("reconnects", |times| times == 1);
    scene.close();
}

#[test]
fn connections_that_break_with_many_calls_under_way_lose_no_request() {
    let scene = Scene::set("5s");
    scene.shim.set(Mode::Hold);
    let sent = scene.shim.count("EVALSHA");
    let ingress = scene.envoy.ingress();
    let requests = std::thread::spawn(move || at_once_from_each(ingress, 200, &Request::get("/")));
    scene.shim.wait_for("EVALSHA", sent + 200);
    scene.shim.set(Mode::Refuse);
    let responses = requests.join().unwrap();
    assert_eq!(with_status(&responses, 200), 200);
    assert!(responses.iter().all(is_waved_through));
    scene.envoy.wait_for_count("per-ip fail_allow", |times| times == 200);
    assert_eq!(scene.envoy.count("errors unavailable"), 200);
    assert_eq!(scene.shim.count("EVALSHA"), sent + 200, "none is sent again");
    scene.close();
}

#[test]
fn an_idle_connection_that_the_server_closes_costs_no_request() {
    let scene = Scene::set("5s");
    scene.shim.close_all();
    wait_until("the worker has noticed, and is connected again", || scene.shim.accepted() == 2);
    wait_until("it counts as connected", || scene.envoy.gauge("connected") == 1);
    assert!(quota(&scene.envoy.get("/")).is_some());
    scene.envoy.wait_for_count("reconnects", |times| times == 1);
    assert_eq!(scene.envoy.count("per-ip fail_allow"), 0);
    scene.close();
}

#[test]
fn a_worker_that_stalled_does_not_blame_redis() {
    let scene = Scene::set("500ms");
    // What the worker looks at first when it wakes is a matter of luck: its clock, or its sockets.
    for _ in 0..4 {
        scene.shim.set(Mode::Hold);
        let sent = scene.shim.count("EVALSHA");
        let mut client = scene.envoy.client();
        client.send(&Request::get("/"));
        scene.shim.wait_for("EVALSHA", sent + 1);
        scene.envoy.freeze();
        // The answer lies in the worker's socket well before the deadline, and the worker sleeps past it.
        scene.shim.set(Mode::Pass);
        std::thread::sleep(Duration::from_millis(700));
        scene.envoy.thaw();
        assert!(quota(&client.receive()).is_some(), "it was answered in time");
    }
    scene.close();
}
