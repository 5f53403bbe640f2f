//! Passwords, users, databases and TLS.

use std::path::Path;

use redis::Commands;
use serde_json::{Value, json};

use crate::support::app::App;
use crate::support::envoy::{Document, Envoy, PATIENT, Setup};
use crate::support::server::{Kind, Server, free_port, wait_until};
use crate::support::shim::Shim;
use crate::support::tls::{certificates, tls_server};
use crate::{KEY, forgetful, is_waved_through, quota, until_decided};

const PASSWORD: &str = "correct-horse-battery-staple";
const WRONG: &str = "tr0ub4dor-and-3";

/// A configuration with these settings of `redis`.
fn with_redis(redis: Value) -> Value {
    let mut configuration = json!({
        "redis": {"timeout": PATIENT},
        "rules": [{"name": "per-ip", "limits": [{"capacity": 10, "refill": "1/day"}]}],
    });
    for (name, value) in redis.as_object().unwrap() {
        configuration["redis"][name] = value.clone();
    }
    configuration
}

/// No line of the log has a password in it.
fn check_secrecy(envoy: &Envoy) {
    let log = envoy.log();
    for secret in [PASSWORD, WRONG] {
        assert!(!log.contains(secret), "the log has the password");
    }
}

#[test]
fn a_password_comes_first_on_every_connection() {
    let (redis, app) = (Server::start(Kind::Redis, &["--requirepass", PASSWORD]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app)
        .configuration(with_redis(json!({"password": PASSWORD, "database": 3})))
        .workers(2)
        .start();
    for left in (5..10).rev() {
        assert_eq!(quota(&envoy.get("/")), Some((10, left)));
    }
    shim.close_all();
    wait_until("both workers are connected again", || shim.count("SELECT") == 4);
    wait_until("they count as connected", || envoy.gauge("connected") == 2);
    assert_eq!(quota(&envoy.get("/")), Some((10, 4)));
    let conversations = shim.conversations();
    assert_eq!(conversations.len(), 4);
    for (number, commands) in conversations {
        assert_eq!(commands[..2], ["AUTH", "SELECT"], "connection {number}: {commands:?}");
        assert!(commands[2..].iter().all(|name| name == "EVALSHA" || name == "EVAL"), "{commands:?}");
    }
    check_secrecy(&envoy);
    envoy.finish();
}

#[test]
fn the_database_is_the_one_that_was_configured() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let envoy = Setup::new(redis.port(), &app).configuration(with_redis(json!({"database": 3}))).start();
    assert_eq!(quota(&envoy.get("/")), Some((10, 9)));
    let mut connection = redis.client();
    assert!(!connection.exists::<_, bool>(KEY).unwrap());
    redis::cmd("SELECT").arg(3).exec(&mut connection).unwrap();
    assert!(connection.exists::<_, bool>(KEY).unwrap());
    envoy.finish();
}

#[test]
fn a_database_that_is_not_there_is_an_outage() {
    let (redis, app) = (Server::start(Kind::Redis, &["--databases", "2"]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).configuration(with_redis(json!({"database": 3}))).unconnected().start();
    for _ in 0..5 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    assert_eq!(shim.count("EVALSHA") + shim.count("EVAL"), 0, "a call went to the wrong database");
    envoy.wait_for_count("per-ip fail_allow", |times| times == 5);
    envoy.finish();
}

#[test]
fn a_wrong_password_sends_no_call_and_the_right_one_is_noticed_when_it_comes() {
    let (redis, app) = (Server::start(Kind::Redis, &["--requirepass", WRONG]), App::start());
    let shim = Shim::before(redis.port());
    let envoy =
        Setup::new(shim.port(), &app).configuration(with_redis(json!({"password": PASSWORD}))).unconnected().start();
    for _ in 0..20 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    envoy.wait_for_count("per-ip fail_allow", |times| times == 20);
    envoy.wait_for_failed_calls(20, "auth");
    assert_eq!(envoy.gauge("connected"), 0);
    assert_eq!(shim.count("EVALSHA") + shim.count("EVAL"), 0, "a call went out without a login");
    let said = envoy.said();
    assert!(said[0].1.contains("auth") && said[1].1.contains("the breaker is open"), "{said:?}");
    assert_eq!(said.len(), 2, "{said:?}");
    let mut admin = redis.connect(&format!(":{WRONG}@")).unwrap();
    redis::cmd("CONFIG").arg("SET").arg("requirepass").arg(PASSWORD).exec(&mut admin).unwrap();
    assert_eq!(until_decided(&envoy), (10, 9));
    assert_eq!(quota(&envoy.get("/")), Some((10, 8)));
    check_secrecy(&envoy);
    envoy.finish();
}

#[test]
fn a_password_that_is_needed_and_not_configured_is_an_outage_of_its_kind() {
    let (redis, app) = (Server::start(Kind::Redis, &["--requirepass", PASSWORD]), App::start());
    let shim = Shim::before(redis.port());
    let envoy = Setup::new(shim.port(), &app).configuration(with_redis(json!({}))).unconnected().start();
    for _ in 0..20 {
        assert!(is_waved_through(&envoy.get("/")));
    }
    envoy.wait_for_failed_calls(20, "auth");
    assert!(shim.accepted() <= 10, "{} connections for 20 requests", shim.accepted());
    let mut admin = redis.connect(&format!(":{PASSWORD}@")).unwrap();
    redis::cmd("CONFIG").arg("SET").arg("requirepass").arg("").exec(&mut admin).unwrap();
    assert_eq!(until_decided(&envoy), (10, 9));
    envoy.finish();
}

#[test]
fn a_password_that_is_configured_and_not_needed_is_an_outage_of_its_kind() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let shim = Shim::before(redis.port());
    let envoy =
        Setup::new(shim.port(), &app).configuration(with_redis(json!({"password": PASSWORD}))).unconnected().start();
    assert!(is_waved_through(&envoy.get("/")));
    envoy.wait_for_count("errors auth", |times| times >= 1);
    assert_eq!(shim.count("EVALSHA") + shim.count("EVAL"), 0);
    check_secrecy(&envoy);
    envoy.finish();
}

#[test]
fn a_user_with_the_least_rights_is_enough() {
    for kind in Kind::ALL {
        let (redis, app) = (Server::start(kind, &[]), App::start());
        let mut admin = redis.client();
        let rights = ["on", &format!(">{PASSWORD}"), "~quota:*", "-@all"];
        let commands = ["+eval", "+evalsha", "+time", "+hmget", "+hset", "+pexpire", "+select"];
        redis::cmd("ACL").arg("SETUSER").arg("mesh").arg(&rights).arg(&commands).exec(&mut admin).unwrap();
        let envoy = Setup::new(redis.port(), &app)
            .configuration(forgetful(with_redis(json!({"username": "mesh", "password": PASSWORD}))))
            .start();
        for left in (0..10).rev() {
            assert_eq!(quota(&envoy.get("/")), Some((10, left)));
        }
        assert_eq!(envoy.get("/").status(), 429);
        // The right is taken away: that is no denial, and it is over when it is there again.
        redis::cmd("ACL").arg("SETUSER").arg("mesh").arg("-evalsha").exec(&mut admin).unwrap();
        assert!(is_waved_through(&envoy.get("/")));
        envoy.wait_for_count("errors noperm", |times| times == 1);
        redis::cmd("ACL").arg("SETUSER").arg("mesh").arg("+evalsha").exec(&mut admin).unwrap();
        assert_eq!(envoy.get("/").status(), 429);
        check_secrecy(&envoy);
        envoy.finish();
    }
}

#[test]
fn a_user_that_is_deleted_while_it_is_connected_is_an_outage_until_it_is_there_again() {
    let (redis, app) = (Server::start(Kind::Redis, &[]), App::start());
    let mut admin = redis.client();
    let mut create = redis::cmd("ACL");
    create.arg("SETUSER").arg("mesh").arg("on").arg(format!(">{PASSWORD}")).arg("~*").arg("+@all");
    create.exec(&mut admin).unwrap();
    let envoy = Setup::new(redis.port(), &app)
        .configuration(with_redis(json!({"username": "mesh", "password": PASSWORD})))
        .start();
    assert_eq!(quota(&envoy.get("/")), Some((10, 9)));
    redis::cmd("ACL").arg("DELUSER").arg("mesh").exec(&mut admin).unwrap();
    wait_until("the loss is noticed", || is_waved_through(&envoy.get("/")) && envoy.count("errors auth") > 0);
    create.exec(&mut admin).unwrap();
    assert_eq!(until_decided(&envoy), (10, 8));
    envoy.finish();
}

/// Makes the cluster speak TLS, trusting that authority, and showing a certificate where there is one.
fn trust(document: &mut Document, authority: &Path, own: Option<[&Path; 2]>) {
    let own = own.map(
        |[certificate, key]| json!({"certificate_chain": {"filename": certificate}, "private_key": {"filename": key}}),
    );
    document.cluster("meshquota_redis")["transport_socket"] = json!({
        "name": "envoy.transport_sockets.tls",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "sni": "redis.test",
            "common_tls_context": {
                "tls_certificates": own.into_iter().collect::<Vec<_>>(),
                "validation_context": {
                    "trusted_ca": {"filename": authority},
                    "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "redis.test"}}],
                },
            },
        },
    });
}

#[test]
fn redis_is_reached_over_tls_and_only_where_its_certificate_is_right() {
    let files = tempfile::tempdir().unwrap();
    let [authority, certificate, key] = certificates(files.path(), "right");
    let [stranger, ..] = certificates(files.path(), "wrong");
    let (port, app) = (free_port(), App::start());
    let redis = tls_server(port, [&authority, &certificate, &key], "no", &["--requirepass", PASSWORD]);
    let configuration = with_redis(json!({"password": PASSWORD}));
    let trusting = Setup::new(port, &app)
        .configuration(configuration.clone())
        .tweak(move |document| trust(document, &authority, None))
        .start();
    for left in (7..10).rev() {
        assert_eq!(quota(&trusting.get("/")), Some((10, left)));
    }
    trusting.finish();
    let wary = Setup::new(port, &app)
        .configuration(configuration)
        .tweak(move |document| trust(document, &stranger, None))
        .unconnected()
        .start();
    for _ in 0..3 {
        assert!(is_waved_through(&wary.get("/")));
    }
    wary.wait_for_count("errors unavailable", |times| times == 3);
    wary.finish();
    let mut admin = redis.connect(&format!(":{PASSWORD}@")).unwrap();
    assert!(admin.exists::<_, bool>(KEY).unwrap());
}

#[test]
fn a_server_that_asks_for_a_certificate_gets_one_directly_and_through_redis_proxy() {
    let files = tempfile::tempdir().unwrap();
    let [authority, certificate, key] = certificates(files.path(), "mutual");
    let (port, app) = (free_port(), App::start());
    let _redis = tls_server(port, [&authority, &certificate, &key], "yes", &[]);
    let mut left = 10;
    for file in ["envoy/envoy.yaml", "envoy/redis-proxy.yaml"] {
        let (authority, certificate, key) = (authority.clone(), certificate.clone(), key.clone());
        let envoy = Setup::new(port, &app)
            .file(file)
            .configuration(with_redis(json!({})))
            .tweak(move |document| {
                trust(document, &authority, Some([&certificate, &key]));
                // This server has no user of that name.
                let cluster = document.cluster("meshquota_redis").as_object_mut().unwrap();
                cluster.remove("typed_extension_protocol_options");
            })
            .start();
        for _ in 0..2 {
            left -= 1;
            assert_eq!(quota(&envoy.get("/")), Some((10, left)), "{file}");
        }
        envoy.finish();
    }
    let nameless = Setup::new(port, &app)
        .configuration(with_redis(json!({})))
        .tweak(move |document| trust(document, &authority, None))
        .unconnected()
        .start();
    assert!(is_waved_through(&nameless.get("/")));
    nameless.wait_for_count("errors unavailable", |times| times == 1);
    nameless.finish();
}
