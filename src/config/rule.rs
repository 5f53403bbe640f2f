//! The field `rules`.

use std::collections::HashMap;
use std::rc::Rc;

use super::reader::{Node, Object};
use super::shape::{Field, List, Shape, Words};
use super::{identity, limits, overrides, response, scope};
use crate::client_ip::ClientIp;
use crate::decision::FailureMode;
use crate::identity::Identity;
use crate::key::Namespace;
use crate::response::Style;
use crate::rule::{Policy, Price, Rule, RuleName};

/// The field.
pub const SHAPE: Shape = Shape::List(List {
    of: "rules",
    element: &Shape::fields(&[
        Field::required(
            "name",
            Shape::Text(Words::matching(RuleName::EXPECTED, "^[a-z0-9_-]{1,64}$")),
            "names the rule in keys, metrics, headers and logs",
        ),
        Field::new(
            "namespace",
            Shape::Text(Words::matching(Namespace::EXPECTED, "^[a-z0-9_-]{0,64}$")),
            "the name",
            "rules of one namespace share their buckets; the empty one, with one limit, gives keys `quota:<ip>`",
        ),
        Field::new("match", scope::SHAPE, "every request", "which requests the rule is for"),
        Field::new("unless", scope::SHAPE, "none", "less these"),
        Field::new(
            "key",
            identity::KEY,
            "[\"client_ip\"]",
            "what tells callers apart, up to 8 parts; without any, all requests are one",
        ),
        Field::new(
            "if_missing",
            identity::IF_MISSING,
            "\"skip\"",
            "a part of the key is absent, empty or blank: `skip` the rule, or `share` a bucket as if the part were empty",
        ),
        Field::required(
            "limits",
            limits::LIMITS,
            "what a caller may take, 1 to 8; a request has to fit into all of them",
        ),
        Field::new("overrides", overrides::SHAPE, "none", "other limits for some callers; the first that fits counts"),
        Field::new("cost", limits::COST, "1", "the tokens that a request takes: a number, or what a header says"),
        Field::new(
            "shadow",
            Shape::Flag,
            "false",
            "only watch: count, and say in the access log what would have been denied",
        ),
        Field::new(
            "failure_mode",
            FAILURE_MODE,
            "the global one",
            "what happens to requests of this rule while Redis cannot be asked",
        ),
        Field::new(
            "response",
            response::DENIAL,
            "the global one",
            "what clients are told, merged into it field by field",
        ),
    ]),
    count: (1, usize::MAX),
    otherwise: "at least one rule; a filter without one does nothing",
});

/// A field `failure_mode`.
pub const FAILURE_MODE: Shape = Shape::Choice(&["allow", "deny", "local"]);

/// Reads a field `failure_mode`.
pub fn read_failure_mode(node: Node<'_>) -> Option<FailureMode> {
    node.parsed(|text| match text {
        "allow" => Some(FailureMode::Allow),
        "deny" => Some(FailureMode::Deny),
        "local" => Some(FailureMode::Local),
        _ => None,
    })
}

/// What rules take from the document around them.
pub struct Common {
    /// What becomes of requests while Redis cannot be asked.
    pub failure_mode: FailureMode,
    /// Whose address is the client's.
    pub client_ip: ClientIp,
    /// What clients are told.
    pub response: Style,
}

/// Reads the field.
pub fn read(node: &Node<'_>, common: &Common) -> Option<Vec<Rule>> {
    let mut named = HashMap::new();
    node.list_of(|node| read_rule(node, &mut named, common))
}

/// Reads a rule. `named` has the names of the rules before it, and where they are.
fn read_rule<'a>(node: Node<'a>, named: &mut HashMap<&'a str, String>, common: &Common) -> Option<Rule> {
    let place = node.path().to_owned();
    let object = node.object()?;
    let name = object.get("name").and_then(|node| {
        let name = node.parsed(RuleName::new)?;
        let first = named.entry(node.text()?).or_insert_with(|| place.clone());
        if *first != place {
            node.fault(format!("the name \"{}\" is that of {first} already; names must differ", name.as_str()));
        }
        Some(name)
    });
    let limits = object.get("limits").and_then(|node| limits::read(&node));
    let namespace = object.given("namespace", |node| {
        let namespace = node.parsed(Namespace::new);
        if has_several_limits(&object) && namespace.as_ref().is_some_and(Namespace::is_bare) {
            node.fault("an empty namespace goes with one limit only, since its key has no number".to_owned());
        }
        namespace
    });
    let (scope, identity) = (scope::read(&object), identity::read(&object));
    // Without a key there is nothing to compare an override's values with.
    let overrides = overrides::read(&object, identity.as_ref().unwrap_or(&Identity::default()), &common.client_ip);
    let price = object.or("cost", Price::default(), limits::read_price);
    let shadow = object.or("shadow", false, |node| node.boolean());
    let failure_mode = object.or("failure_mode", common.failure_mode, read_failure_mode);
    let response = object.or("response", common.response.clone(), |node| response::read(node, &common.response));
    let policy = Policy {
        scope: scope?,
        identity: identity?,
        overrides: overrides?,
        price: price?,
        shadow: shadow?,
        failure_mode: failure_mode?,
        response: response?,
    };
    let name = name?;
    let namespace = namespace?.unwrap_or_else(|| Namespace::of_rule(&name));
    Some(Rule::new(name, namespace, Rc::from(limits?), policy))
}

/// Whether a rule or one of its overrides has more than one limit.
fn has_several_limits(rule: &Object<'_>) -> bool {
    let own = rule.get("limits").into_iter();
    let others = rule.get("overrides").into_iter().flat_map(|node| node.elements());
    own.chain(others.filter_map(|node| node.field("limits"))).any(|limits| limits.elements().len() > 1)
}
