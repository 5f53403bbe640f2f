//! Requests whose denial is known.

use super::*;

#[test]
fn who_was_denied_is_denied_again_without_a_call_until_a_token_is_back() {
    let mut table = Table::connected(ONE_RULE);
    table.request(1);
    table.hear(DENIED);
    for id in 2..5 {
        table.request(id);
        assert_eq!(table.told.pop(), Some(format!("{id} at once deny Some(1.5s) by rule 0")));
    }
    // No other caller is meant.
    table.request_from(5, b"192.0.2.9:1");
    assert!(table.told.pop().unwrap().contains("192.0.2.9"));
    table.hear(ADMITTED);
    table.told.clear();
    // No longer than for a second is it believed.
    table.wait(999);
    table.request(6);
    assert_eq!(table.told, ["6 at once deny Some(501ms) by rule 0"]);
    table.wait(1);
    table.told.clear();
    table.request(7);
    assert_eq!(table.told, [A]);
    table.hear(ADMITTED);
    let counts = table.counts();
    for count in ["deny_cache_hits_ 4", "decisions.rule=a outcome=deny 5", "redis_calls.result=ok 3"] {
        assert!(counts.iter().any(|other| other == count), "{count}: {counts:?}");
    }
}

#[test]
fn a_denial_that_is_known_of_one_rule_spares_the_others_their_calls() {
    let mut table = Table::connected(TWO_RULES);
    table.request(1);
    table.hear(ADMITTED);
    table.hear(DENIED);
    table.hear(ADMITTED);
    table.told.clear();
    table.request(2);
    assert_eq!(table.told, ["2 at once deny Some(1.5s) by rule 1"]);
}

#[test]
fn a_denial_that_is_known_of_a_rule_that_only_watches_spares_its_own_call() {
    let config = r#"{"rules": [
        {"name": "a", "limits": [{"capacity": 10, "refill": "1/s"}], "shadow": true},
        {"name": "b", "limits": [{"capacity": 20, "refill": "1/s"}]}
    ]}"#;
    let mut table = Table::connected(config);
    table.request(1);
    table.hear(DENIED);
    table.hear(ADMITTED);
    table.told.clear();
    table.request(2);
    assert_eq!(table.told, ["EVALSHA quota:{b:192.0.2.1}:0 now 0 count 1"]);
    table.hear(ADMITTED);
    assert!(table.told[1].starts_with("2 allow"), "{:?}", table.told);
    let counts = table.counts();
    assert!(counts.iter().any(|count| count == "decisions.rule=a outcome=shadow_deny 2"), "{counts:?}");
}

#[test]
fn a_denial_that_is_known_outlasts_an_outage() {
    let mut table = Table::connected(TWO_RULES);
    table.request(1);
    table.hear(DENIED);
    table.hear(DENIED);
    table.limiter.closed(table.now, "gone");
    table.drain();
    table.told.clear();
    table.request(2);
    assert_eq!(table.told, ["2 at once deny Some(1.5s) by rule 0"]);
}

#[test]
fn a_denial_ends_when_this_worker_has_given_back_to_its_bucket() {
    let config = TWO_RULES.replacen("\"name\": \"b\"", "\"name\": \"b\", \"match\": {\"path\": \"/b\"}", 1);
    let mut table = Table::connected(&config);
    let request = |table: &mut Table, id, path| {
        let met = table.limiter.meets(&Told::new(&[(":path", path)]));
        match table.limiter.request(table.now, || 0, id, met) {
            Admission::Waits => table.drain(),
            Admission::Decided(decision) => table.told.push(format!("{id} at once {}", in_words(&decision))),
            Admission::NotLimited => panic!("a rule applies"),
        }
    };
    request(&mut table, 1, "/b");
    request(&mut table, 2, "/");
    // The first takes the last token of a in vain; the second finds none, before that is given back.
    table.hear(ADMITTED);
    table.hear(DENIED);
    table.hear(DENIED);
    table.told.clear();
    request(&mut table, 3, "/");
    assert_eq!(table.told, ["3 at once deny Some(1.5s) by rule 0"]);
    table.hear(ADMITTED);
    table.told.clear();
    request(&mut table, 4, "/");
    assert_eq!(table.told, [A]);
}

#[test]
fn turned_off_it_asks_again() {
    let config = TWO_RULES.replacen("\"rules\"", "\"deny_cache\": {\"entries\": 0}, \"rules\"", 1);
    let mut table = Table::connected(&config);
    table.request(1);
    table.hear(DENIED);
    table.hear(DENIED);
    table.told.clear();
    table.request(2);
    assert_eq!(table.told.len(), 1, "turned off, it asks: {:?}", table.told);
}

#[test]
fn a_denial_that_is_known_is_no_news_to_the_buckets_of_the_worker() {
    let mut table = Table::connected(LOCAL);
    table.request(1);
    table.hear(DENIED);
    table.wait(900);
    table.request(2);
    table.wait(100);
    table.told.clear();
    // A token has come since Redis said that none was left.
    table.request(3);
    table.hear(b"-LOADING Redis is loading the dataset in memory\r\n");
    assert!(table.told.contains(&"3 local_allow by rule 0".to_owned()), "{:?}", table.told);
}
