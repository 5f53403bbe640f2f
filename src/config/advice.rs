//! What is legal in a configuration, and surely not meant. A rule or a limit is named that changes nothing, or lets
//! nothing through; nothing is said where that cannot be told for certain.

use super::reader::Remark;
use crate::quota::Limit;
use crate::rule::{Price, Rule};

/// What there is to say of these rules.
pub fn on(rules: &[Rule]) -> impl Iterator<Item = Remark> {
    rules.iter().enumerate().flat_map(|(place, rule)| {
        let others = rules.iter().enumerate().filter(move |(other, _)| *other != place);
        let besides = others.filter_map(move |(other_place, other)| beside((place, rule), (other_place, other)));
        [is_for_nothing(place, rule), costs_too_much(place, rule)].into_iter().flatten().chain(besides.take(1))
    })
}

fn is_for_nothing(place: usize, rule: &Rule) -> Option<Remark> {
    let what = "leaves out all that match lets in, so that the rule is for no request";
    rule.policy().scope.is_empty().then(|| Remark { path: format!("rules[{place}].unless"), what: what.to_owned() })
}

fn costs_too_much(place: usize, rule: &Rule) -> Option<Remark> {
    let least = rule.limits().iter().map(|limit| limit.capacity().get()).min()?;
    let (field, cost) = match &rule.policy().price {
        Price::Fixed(cost) => ("cost", cost.get()),
        Price::Header { default, .. } => ("cost.default", default.get()),
    };
    let what = format!("{cost} is above the capacity of {least}: such a request can never be admitted");
    (cost > least).then(|| Remark { path: format!("rules[{place}].{field}"), what })
}

/// What there is to say of a rule because of another.
fn beside((place, rule): (usize, &Rule), (other_place, other): (usize, &Rule)) -> Option<Remark> {
    let (these, those) = (rule.policy(), other.policy());
    let same_callers = these.identity == those.identity && those.scope.covers(&these.scope);
    let what = if !same_callers || these.scope.is_empty() {
        return None;
    } else if rule.namespace() == other.namespace() {
        // Said once, of the later of two that are for the same requests.
        if place < other_place && these.scope.covers(&those.scope) {
            return None;
        }
        "shares its namespace and all its requests with"
    } else if never_denies_beside(rule, other) && (other_place < place || !never_denies_beside(other, rule)) {
        "never denies a request: at least as strict, for the same callers and all its requests, is"
    } else {
        return None;
    };
    let mut what = format!("{what} rules[{other_place}] (\"{}\")", other.name().as_str());
    if rule.namespace() == other.namespace() {
        what.push_str(", so that each of them takes from the same buckets twice");
    }
    Some(Remark { path: format!("rules[{place}]"), what })
}

/// Whether all that the other rule admits is within the limits of this one.
fn never_denies_beside(rule: &Rule, other: &Rule) -> bool {
    let (these, those) = (rule.policy(), other.policy());
    let implied = |limit: &Limit| other.limits().iter().any(|other| other.implies(limit));
    let plain = these.overrides.is_empty() && those.overrides.is_empty() && !those.shadow;
    let same_callers = these.identity == those.identity && those.scope.covers(&these.scope);
    plain && same_callers && these.price == those.price && rule.limits().iter().all(implied)
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn warnings(rules: &str) -> Vec<String> {
        let config = Config::from_json(format!(r#"{{"rules": [{rules}]}}"#).as_bytes()).unwrap();
        config.warnings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_limit_that_never_binds_is_named() {
        let limits = |limits: &str| warnings(&format!(r#"{{"name": "a", "limits": [{limits}]}}"#));
        let second =
            "rules[0].limits[1]: never binds, since limits[0] beside it allows no larger burst and no more over time";
        let first =
            "rules[0].limits[0]: never binds, since limits[1] beside it allows no larger burst and no more over time";
        let cases: &[(&str, &[&str])] = &[
            (r#"{"capacity": 10, "refill": "10/s"}, {"capacity": 100, "refill": "1000/min"}"#, &[second]),
            (r#"{"capacity": 100, "refill": "1000/min"}, {"capacity": 10, "refill": "10/s"}"#, &[first]),
            (r#"{"refill": "10/s"}, {"refill": "600/min"}"#, &[second]),
            (r#"{"capacity": 10, "refill": "10/s"}, {"capacity": 1000, "refill": "1000/h"}"#, &[]),
            (r#"{"capacity": 10, "refill": "10/s"}, {"capacity": 9, "refill": "11/s"}"#, &[]),
        ];
        for (text, expected) in cases {
            assert_eq!(limits(text), *expected, "{text}");
        }
    }

    #[test]
    fn a_limit_of_an_override_that_never_binds_is_named_too_and_one_that_finds_nobody() {
        let rule = r#"{"name": "a", "limits": [{"refill": "1/s"}], "overrides": [
            {"cidrs": ["10.0.0.0/8"], "limits": [{"refill": "2/s"}, {"refill": "3/s"}]},
            {"cidrs": ["10.1.0.0/16", "192.0.2.0/24"], "unlimited": true},
            {"values": ["192.0.2.1"], "unlimited": true},
            {"values": ["192.0.2.1"], "unlimited": true}
        ]}"#;
        let said = "of its callers are those of overrides before it, which count; it is not for them";
        let expected = [
            "rules[0].overrides[0].limits[1]: never binds, since limits[0] beside it allows no larger burst and no more over time"
                .to_owned(),
            format!("rules[0].overrides[1]: some {said}"),
            format!("rules[0].overrides[3]: all {said}"),
        ];
        assert_eq!(warnings(rule), expected);
    }

    #[test]
    fn a_rule_for_nothing_and_a_cost_that_is_never_paid_are_named() {
        let cases = [
            (r#""match": {"path": "/a"}, "unless": {"path_prefix": "/"}"#, true),
            (
                r#""match": {"path": "/a", "methods": ["GET"]}, "unless": [{"route": "x"}, {"methods": ["PUT", "GET"]}]"#,
                true,
            ),
            (r#""match": [{"path": "/a"}, {"path": "/b"}], "unless": {"path": "/a"}"#, false),
            (r#""match": {"path_prefix": "/a"}, "unless": {"path_prefix": "/ab"}"#, false),
            (r#""unless": {"path_prefix": "/"}"#, false),
        ];
        for (fields, expected) in cases {
            let said = warnings(&format!(r#"{{"name": "a", "limits": [{{"refill": "1/s"}}], {fields}}}"#));
            let what = "rules[0].unless: leaves out all that match lets in, so that the rule is for no request";
            assert_eq!(said, if expected { vec![what] } else { vec![] }, "{fields}");
        }
        let costly = warnings(r#"{"name": "a", "limits": [{"capacity": 3, "refill": "9/s"}], "cost": 4}"#);
        assert_eq!(costly, ["rules[0].cost: 4 is above the capacity of 3: such a request can never be admitted"]);
        let costly = warnings(r#"{"name": "a", "limits": [{"refill": "1/s"}], "cost": {"header": "x", "default": 2}}"#);
        assert_eq!(
            costly,
            ["rules[0].cost.default: 2 is above the capacity of 1: such a request can never be admitted"]
        );
    }

    #[test]
    fn a_rule_that_another_leaves_nothing_to_do_is_named() {
        let two = |first: &str, second: &str| {
            warnings(&format!(
                r#"{{"name": "a", "limits": [{{"refill": "5/s"}}]{first}}}, {{"name": "b", "limits": [{{"refill": "9/s"}}]{second}}}"#
            ))
        };
        let never = "rules[1]: never denies a request: at least as strict, for the same callers and all its requests, is rules[0] \
                     (\"a\")";
        let cases: &[(&str, &str, &[&str])] = &[
            ("", "", &[never]),
            ("", r#", "match": {"path": "/a"}"#, &[never]),
            (r#", "match": {"path_prefix": "/a"}"#, r#", "match": {"path": "/ab", "methods": ["GET"]}"#, &[never]),
            (r#", "unless": {"path": "/a"}"#, r#", "unless": [{"path_prefix": "/a"}, {"route": "x"}]"#, &[never]),
            (r#", "match": {"client_ip": ["10.0.0.0/8"]}"#, r#", "match": {"client_ip": ["10.1.0.0/16"]}"#, &[never]),
            (r#", "match": {"hosts": ["*.a.b"]}"#, r#", "match": {"hosts": ["c.a.b", "*.d.a.b"]}"#, &[never]),
            (
                r#", "match": {"headers": [{"name": "x"}]}"#,
                r#", "match": {"headers": [{"name": "y"}, {"name": "x", "exact": "1"}]}"#,
                &[never],
            ),
            // The wider one has work to do.
            (r#", "match": {"path": "/a"}"#, "", &[]),
            (r#", "unless": {"path": "/a"}"#, "", &[]),
            (r#", "match": {"methods": ["GET"]}"#, r#", "match": {"methods": ["GET", "PUT"]}"#, &[]),
            (
                r#", "match": {"headers": [{"name": "x", "exact": "1"}]}"#,
                r#", "match": {"headers": [{"name": "x"}]}"#,
                &[],
            ),
            // Other callers, other prices, and one that only watches.
            (r#", "key": ["path"]"#, "", &[]),
            (r#", "cost": 2"#, "", &[]),
            (r#", "shadow": true"#, "", &[]),
            ("", r#", "shadow": true"#, &[never]),
            ("", r#", "overrides": [{"cidrs": ["10.0.0.0/8"], "limits": [{"refill": "1/s"}]}]"#, &[]),
        ];
        for (first, second, expected) in cases {
            assert_eq!(two(first, second), *expected, "{first} {second}");
        }
        let twice = "rules[1]: shares its namespace and all its requests with rules[0] (\"a\"), so that each of them takes from \
                     the same buckets twice";
        assert_eq!(two(r#", "namespace": "n""#, r#", "namespace": "n""#), [twice]);
        assert_eq!(
            two(r#", "namespace": "n", "match": {"path": "/a"}"#, r#", "namespace": "n", "match": {"path": "/b"}"#),
            [""; 0]
        );
    }
}
