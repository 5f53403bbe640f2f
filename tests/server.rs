//! The test servers themselves: what the other tests rely on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use support::server::{Kind, Server, wait_until};

fn ping(server: &Server) -> String {
    redis::cmd("PING").query(&mut server.client()).unwrap()
}

#[test]
fn a_server_answers_until_it_is_dropped() {
    for kind in Kind::ALL {
        let server = Server::start(kind, &[]);
        assert_eq!(ping(&server), "PONG");
        let (port, directory) = (server.port(), server.directory().to_owned());
        drop(server);
        std::net::TcpStream::connect(("127.0.0.1", port)).unwrap_err();
        assert!(!directory.exists());
    }
}

#[test]
fn a_killed_server_comes_back_on_its_port_and_has_forgotten_everything() {
    let mut server = Server::start(Kind::Redis, &[]);
    let (port, pid) = (server.port(), server.pid());
    let _: () = redis::cmd("SET").arg("a").arg(1).query(&mut server.client()).unwrap();
    server.kill();
    server.restart();
    assert_eq!(server.port(), port);
    assert_ne!(server.pid(), pid);
    let keys: u64 = redis::cmd("DBSIZE").query(&mut server.client()).unwrap();
    assert_eq!(keys, 0);
}

#[test]
fn a_stopped_server_answers_only_after_it_goes_on() {
    let server = Server::start(Kind::Redis, &[]);
    let state = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.pid())).unwrap();
        stat.rsplit(") ").next().unwrap().chars().next().unwrap()
    };
    server.stop();
    wait_until("the process is stopped", || state() == 'T');
    server.cont();
    assert_eq!(ping(&server), "PONG");
}

#[test]
fn extra_arguments_win_and_a_password_does_not_keep_a_server_from_being_ready() {
    let server = Server::start(Kind::Redis, &["--requirepass", "secret", "--appendonly", "yes"]);
    let mut client = server.connect(":secret@").unwrap();
    let (_, appendonly): (String, String) =
        redis::cmd("CONFIG").arg("GET").arg("appendonly").query(&mut client).unwrap();
    assert_eq!(appendonly, "yes");
}
