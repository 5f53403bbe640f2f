//! The JSON Schema (draft 2020-12) of the configuration, for editors and for checks before a rollout. It is written from
//! the [shapes](super::shape) that the reader reads by, and exists on the host only.
//!
//! Invariant: what the reader takes is valid by the schema. The reverse does not hold: a schema cannot tell that names
//! differ, that a regular expression is one, or that a capacity goes with its refill.

use serde_json::{Map, Value, json};

use super::SHAPE;
use super::shape::{Among, Field, List, Object, Shape, Words};

/// The schema of a whole configuration.
pub fn json_schema() -> Value {
    let mut schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "meshquota",
        "description": "The configuration of the meshquota filter for Envoy and Istio.",
    });
    extend(&mut schema, of(&SHAPE));
    schema
}

fn of(shape: &Shape) -> Value {
    match shape {
        Shape::Flag => json!({"type": "boolean"}),
        Shape::Integer(least, most) => json!({"type": "integer", "minimum": least, "maximum": most}),
        Shape::Text(words) => text(words),
        Shape::Secret(words) => {
            let mut schema = text(words);
            extend(&mut schema, json!({"writeOnly": true}));
            schema
        }
        Shape::Choice(names) => json!({"enum": names}),
        Shape::List(list) => of_list(list),
        Shape::Object(object) => of_object(object),
        Shape::Map(_, values) => json!({"type": "object", "additionalProperties": of(values)}),
        Shape::Either(_, alternatives) => json!({"anyOf": alternatives.iter().map(of).collect::<Vec<_>>()}),
    }
}

fn text(words: &Words) -> Value {
    let mut schema = json!({"type": "string"});
    if let Some(pattern) = words.pattern {
        extend(&mut schema, json!({"pattern": pattern}));
    }
    schema
}

fn of_list(list: &List) -> Value {
    let (least, most) = list.count;
    let mut schema = json!({"type": "array", "items": of(list.element)});
    if least > 0 {
        extend(&mut schema, json!({"minItems": least}));
    }
    if most < usize::MAX {
        extend(&mut schema, json!({"maxItems": most}));
    }
    schema
}

fn of_object(object: &Object) -> Value {
    let properties = object.fields.iter().map(|field| (field.name.to_owned(), of_field(field)));
    let mut schema = json!({
        "type": "object",
        "properties": properties.collect::<Map<_, _>>(),
        "additionalProperties": false,
    });
    let required = object.fields.iter().filter(|field| field.required).map(|field| field.name).collect::<Vec<_>>();
    if !required.is_empty() {
        extend(&mut schema, json!({"required": required}));
    }
    if !object.among.is_empty() {
        extend(&mut schema, json!({"allOf": object.among.iter().map(of_among).collect::<Vec<_>>()}));
    }
    schema
}

fn of_among(among: &Among) -> Value {
    let mut each = among.names.iter().map(|name| json!({"required": [name]})).collect::<Vec<_>>();
    let (least, most) = among.count;
    if least == 0 {
        each.insert(0, json!({"not": {"anyOf": each.clone()}}));
    }
    if most == 1 { json!({"oneOf": each}) } else { json!({"anyOf": each}) }
}

fn of_field(field: &Field) -> Value {
    let mut schema = of(&field.shape);
    extend(&mut schema, json!({"description": field.meaning}));
    // Words in place of a default are for people.
    if let Ok(default) = serde_json::from_str::<Value>(field.default) {
        extend(&mut schema, json!({"default": default}));
    }
    schema
}

fn extend(schema: &mut Value, with: Value) {
    if let (Value::Object(schema), Value::Object(with)) = (schema, with) {
        schema.extend(with);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::{Index, select};

    use super::*;
    use crate::config::Config;
    use crate::config::tests::wrong_documents;

    /// A document in which every field is set.
    const EVERYTHING: &str = include_str!("everything.json");

    fn validator() -> jsonschema::Validator {
        jsonschema::validator_for(&json_schema()).unwrap()
    }

    #[test]
    fn the_schema_is_one_and_takes_a_document_with_every_field() {
        assert!(jsonschema::meta::is_valid(&json_schema()));
        let document = serde_json::from_str(EVERYTHING).unwrap();
        Config::from_json(EVERYTHING.as_bytes()).unwrap();
        let errors = validator().iter_errors(&document).map(|error| error.to_string()).collect::<Vec<_>>();
        assert_eq!(errors, [""; 0]);
    }

    #[test]
    fn the_default_of_a_field_is_what_holds_without_it() {
        let smallest = json!({"rules": [{"name": "a", "limits": [{"refill": "10/s"}]}]});
        let config = |document: &Value| Config::from_json(document.to_string().as_bytes()).unwrap();
        let mut seen = 0;
        let mut with_default = |path: &str, field: &Field, around: &dyn Fn(Value) -> Value| {
            let Ok(default) = serde_json::from_str::<Value>(field.default) else { return };
            // That the default of the content type is the proxy's own is not said in the configuration.
            if field.name != "content_type" {
                let document = around(json!({field.name: default}));
                assert_eq!(format!("{:?}", config(&document)), format!("{:?}", config(&around(json!({})))), "{path}");
                seen += 1;
            }
        };
        let merged = |with: Value| {
            let mut document = smallest.clone();
            extend(&mut document, with);
            document
        };
        let rule = |with: Value| {
            let mut document = smallest.clone();
            extend(&mut document["rules"][0], with);
            document
        };
        let fields = |shape: &'static Shape| shape.object().unwrap().fields;
        for field in fields(&SHAPE) {
            with_default(field.name, field, &merged);
            if let Shape::Object(object) = &field.shape {
                for inner in object.fields {
                    with_default(inner.name, inner, &|value| merged(json!({field.name: value})));
                }
            }
        }
        let rules = SHAPE.object().unwrap().fields.iter().find(|field| field.name == "rules").unwrap();
        for field in fields(rules.shape.list().unwrap().element) {
            with_default(field.name, field, &rule);
        }
        assert!(seen > 25, "{seen}");
    }

    #[test]
    fn most_wrong_documents_are_refused_by_the_schema_too() {
        let validator = validator();
        let documents = wrong_documents();
        let unseen = documents.iter().filter_map(|(document, fault)| {
            let document = serde_json::from_str::<Value>(document).ok()?;
            validator.is_valid(&document).then_some(fault.as_str())
        });
        let unseen = unseen.collect::<Vec<_>>();
        // What only the reader can tell: what stands in another place, and what a text means.
        let beyond = [
            "is there twice",
            "names must differ",
            "goes with one limit only",
            "a username without a password",
            "is above the max",
            "can be counted exactly",
            "one for each part",
            "a value of the key's part",
            "a path in its normal form",
            "a regular expression",
            "a host without a port",
            "a duration from 1ms",
            "a whole number of tokens",
            "a time from 1ms",
            "found \"10.0.0.256\"",
            "found \"10.0.0.0/33\"",
            "is that of",
        ];
        for fault in &unseen {
            assert!(beyond.iter().any(|words| fault.contains(words)), "the schema takes what is refused: {fault}");
        }
        assert!(unseen.len() * 3 < documents.len(), "{} of {}", unseen.len(), documents.len());
    }

    /// The places of a document, as JSON pointers.
    fn places(value: &Value, path: &str, found: &mut Vec<String>) {
        found.push(path.to_owned());
        match value {
            Value::Array(list) => {
                for (place, value) in list.iter().enumerate() {
                    places(value, &format!("{path}/{place}"), found);
                }
            }
            Value::Object(object) => {
                for (name, value) in object {
                    places(value, &format!("{path}/{}", name.replace('~', "~0").replace('/', "~1")), found);
                }
            }
            _ => {}
        }
    }

    /// Values such as documents have, of any kind.
    fn a_value() -> impl Strategy<Value = Value> {
        let texts = select(vec![
            "",
            " ",
            "a",
            "A b",
            "gold",
            "10/s",
            "+5 / 1h 30m",
            "0/s",
            "50ms",
            "1 s",
            "11s",
            "10.0.0.0/8",
            "::1",
            "/a",
            "/a?b",
            "GET",
            "*.example.com",
            "x-key",
            "application/json",
            "/",
            "skip",
            "share",
            "client_ip",
            "route",
            "x-ratelimit",
            "both",
            "none",
            "allow",
            "proxy",
            "[a-z]+",
            "(",
            "\u{e9}",
        ]);
        let scalar = prop_oneof![
            texts.prop_map(|text| json!(text)),
            select(vec![-1_i64, 0, 1, 7, 64, 429, 65_536, 1_000_001, i64::MAX]).prop_map(|number| json!(number)),
            select(vec![0.5, 1.0, 1e15, 1e300, -3.0]).prop_map(|number| json!(number)),
            any::<bool>().prop_map(|truth| json!(truth)),
            Just(Value::Null),
        ];
        let names = select(vec!["a", "name", "header", "limits", "refill", "path", "exact", "X-Y", "max"]);
        scalar.prop_recursive(2, 6, 3, move |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..3).prop_map(Value::Array),
                proptest::collection::vec((names.clone(), inner), 0..3)
                    .prop_map(|fields| fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()),
            ]
        })
    }

    #[derive(Clone, Debug)]
    enum Change {
        Replace(Value),
        Remove,
        Copy(Index),
    }

    fn change(document: &mut Value, place: Index, change: &Change) {
        let mut found = Vec::new();
        places(document, "", &mut found);
        let path = place.get(&found).clone();
        match change {
            Change::Replace(value) => *document.pointer_mut(&path).unwrap() = value.clone(),
            Change::Copy(from) => {
                let value = document.pointer(from.get(&found).as_str()).unwrap().clone();
                *document.pointer_mut(&path).unwrap() = value;
            }
            Change::Remove => {
                let Some((parent, name)) = path.rsplit_once('/') else { return };
                match document.pointer_mut(parent) {
                    Some(Value::Object(object)) => drop(object.remove(&name.replace("~1", "/").replace("~0", "~"))),
                    Some(Value::Array(list)) => drop(list.remove(name.parse().unwrap())),
                    _ => panic!("a place is in a list or an object"),
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn what_the_reader_takes_is_valid(changes in proptest::collection::vec((any::<Index>(), prop_oneof![
            a_value().prop_map(Change::Replace),
            Just(Change::Remove),
            any::<Index>().prop_map(Change::Copy),
        ]), 1..4)) {
            thread_local!(static VALIDATOR: jsonschema::Validator = validator());
            let mut document: Value = serde_json::from_str(EVERYTHING).unwrap();
            for (place, how) in &changes {
                change(&mut document, *place, how);
            }
            if Config::from_json(document.to_string().as_bytes()).is_ok() {
                prop_assert!(VALIDATOR.with(|validator| validator.is_valid(&document)), "{document}");
            }
        }
    }
}
