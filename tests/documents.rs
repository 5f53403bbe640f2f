//! The documents are true: what they say of the configuration is written from the code or checked against it, and what they
//! point to is there.
//!
//! `make docs` (these tests with UPDATE=1) writes the generated parts anew: the tables of fields, the files that pages show,
//! and the JSON Schema.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[path = "documents/links.rs"]
mod links;
#[path = "support/markdown.rs"]
mod markdown;
#[path = "support/project.rs"]
mod project;

use std::fs;
use std::path::Path;

use meshquota::config::shape::{Field, Object, Shape};
use meshquota::config::{Config, SHAPE, schema};
use serde_json::Value;

use markdown::{blocks_of, documents};
use project::{project, read};

const REFERENCE: &str = "docs/configuration.md";
const RECIPES: &str = "docs/recipes.md";
const SCHEMA: &str = "envoy/meshquota.schema.json";

/// Checks that a file says this, or makes it so where that is asked for.
fn check_written(path: &str, expected: &str) {
    let mut found = fs::read_to_string(project().join(path)).unwrap_or_default();
    if found != expected && std::env::var_os("UPDATE").is_some() {
        fs::write(project().join(path), expected).unwrap();
        found = expected.to_owned();
    }
    let differs = found.lines().zip(expected.lines()).position(|(found, expected)| found != expected);
    let line = differs.unwrap_or_else(|| found.lines().count().min(expected.lines().count()));
    assert!(found == expected, "{path} is not what the code says, from line {}: make docs writes it anew", line + 1);
}

/// All configurations that a user may copy, each with the place where it stands.
fn examples() -> Vec<(String, Value)> {
    let mut texts = Vec::new();
    for path in documents() {
        // Elsewhere a page may show answers in JSON as well.
        let all = ["README.md", REFERENCE, RECIPES].contains(&path.as_str());
        let blocks = blocks_of("json", &read(&path)).into_iter();
        let blocks = blocks.filter(|block| all || block.contains("\"rules\": ["));
        texts.extend(blocks.map(|block| (path.clone(), block)));
    }
    let migrations = ["ratelimit", "application"].map(|from| format!("envoy/migration/{from}/meshquota.json"));
    for path in recipes().into_iter().chain(migrations) {
        let text = read(&path);
        texts.push((path, text));
    }
    let envoy = read("envoy/envoy.yaml");
    let configuration = envoy.split("value: |").nth(1).unwrap().split("- name:").next().unwrap();
    texts.push(("envoy/envoy.yaml".to_owned(), configuration.to_owned()));
    let parse = |(path, text): (String, String)| {
        let value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}\n{text}"));
        (path, value)
    };
    texts.into_iter().map(parse).collect()
}

/// The files of the recipes.
fn recipes() -> Vec<String> {
    let files = fs::read_dir(project().join("envoy/recipes")).unwrap();
    let mut names = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>();
    names.sort();
    names.into_iter().map(|name| format!("envoy/recipes/{name}")).collect()
}

#[test]
fn every_example_is_taken_without_a_fault_or_a_warning_and_is_valid_by_the_schema() {
    let validator = jsonschema::validator_for(&schema::json_schema()).unwrap();
    let examples = examples();
    assert!(examples.len() > 30, "{}", examples.len());
    for (path, example) in examples {
        match Config::from_json(example.to_string().as_bytes()) {
            Ok(config) => assert!(config.warnings.is_empty(), "{path}: {:?}\n{example}", config.warnings),
            Err(errors) => panic!("{path}: {errors}\n{example}"),
        }
        let errors = validator.iter_errors(&example).map(|error| error.to_string()).collect::<Vec<_>>();
        assert!(errors.is_empty(), "{path}: {errors:?}\n{example}");
    }
}

#[test]
fn the_schema_is_written_from_the_code() {
    check_written(SCHEMA, &format!("{}\n", serde_json::to_string_pretty(&schema::json_schema()).unwrap()));
}

/// The fields of a shape that none of these values of it sets. Where a list of objects may stand in place of one, the
/// elements of lists count as such.
fn unset(shape: &Shape, values: &[&Value], path: &str, missing: &mut Vec<String>) {
    let elements = values.iter().filter_map(|value| value.as_array()).flatten();
    match (shape.object(), shape.list()) {
        (Some(object), _) => {
            let objects = values.iter().copied().chain(elements).filter(|value| value.is_object()).collect::<Vec<_>>();
            for field in object.fields {
                let path = if path.is_empty() { field.name.to_owned() } else { format!("{path}.{}", field.name) };
                let values = objects.iter().filter_map(|value| value.get(field.name)).collect::<Vec<_>>();
                if values.is_empty() {
                    missing.push(path);
                } else {
                    unset(&field.shape, &values, &path, missing);
                }
            }
        }
        (None, Some(list)) => unset(list.element, &elements.collect::<Vec<_>>(), &format!("{path}[]"), missing),
        (None, None) => {}
    }
}

#[test]
fn every_field_has_an_example_in_the_reference() {
    let reference = read(REFERENCE);
    let examples = blocks_of("json", &reference)
        .into_iter()
        .map(|block| serde_json::from_str(&block).unwrap())
        .collect::<Vec<Value>>();
    let mut missing = Vec::new();
    unset(&SHAPE, &examples.iter().collect::<Vec<_>>(), "", &mut missing);
    // The same objects have their examples where they stand first.
    missing.retain(|path| !["rules[].unless", "rules[].response."].iter().any(|same| path.starts_with(same)));
    assert!(missing.is_empty(), "{REFERENCE} has no example of {missing:?}");
}

/// A row for each field of an object.
fn table(object: &Object) -> String {
    let mut table = "| field | type | default | meaning |\n|---|---|---|---|\n".to_owned();
    for Field { name, shape, required, default, meaning } in object.fields {
        let default = match serde_json::from_str::<Value>(default) {
            _ if *required => "required".to_owned(),
            Ok(_) => format!("`{default}`"),
            Err(_) => (*default).to_owned(),
        };
        table.push_str(&format!("| `{name}` | {} | {default} | {meaning} |\n", kind(shape)));
    }
    table
}

/// What a value is, in a word or two.
fn kind(shape: &Shape) -> String {
    match shape {
        Shape::Flag => "`true` or `false`".to_owned(),
        Shape::Integer(least, most) if *most == (1 << 53) - 1 => format!("integer from {least}"),
        Shape::Integer(least, most) => format!("integer, {least} to {most}"),
        Shape::Text(_) | Shape::Secret(_) => "text".to_owned(),
        Shape::Choice(names) => names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", "),
        Shape::List(list) => match kind(list.element).as_str() {
            "object" => "list of objects".to_owned(),
            "text" => "list of texts".to_owned(),
            _ => "list".to_owned(),
        },
        Shape::Object(_) | Shape::Map(..) => "object".to_owned(),
        Shape::Either(_, alternatives) => alternatives.iter().map(kind).collect::<Vec<_>>().join(", or "),
    }
}

/// The object at a path such as `rules[].match`.
fn object_at(path: &str) -> &'static Object {
    let mut shape = &SHAPE;
    for name in path.split('.').filter(|name| !name.is_empty()) {
        let object = shape.object().unwrap();
        let (name, is_list) = name.strip_suffix("[]").map_or((name, false), |name| (name, true));
        let field = object.fields.iter().find(|field| field.name == name);
        shape = &field.unwrap_or_else(|| panic!("no field {name} in {path}")).shape;
        if is_list {
            shape = shape.list().unwrap().element;
        }
    }
    shape.object().unwrap_or_else(|| panic!("{path} is no object"))
}

#[test]
fn the_tables_of_the_reference_are_written_from_the_code() {
    let reference = read(REFERENCE);
    let mut parts = reference.split("<!-- fields:");
    let mut expected = parts.next().unwrap().to_owned();
    let mut named = Vec::new();
    for part in parts {
        let (path, mut rest) = part.split_once("-->\n").unwrap();
        // The table that is there ends at the first line that is none of it.
        while let Some((_, after)) = rest.split_once('\n').filter(|_| rest.starts_with(['\n', '|'])) {
            rest = after;
        }
        let table = table(object_at(path.trim()));
        expected.push_str(&format!("<!-- fields:{path}-->\n\n{table}\n{rest}"));
        named.push(path.trim().to_owned());
    }
    check_written(REFERENCE, &expected);
    let wanted = [
        "",
        "deny_cache",
        "redis",
        "redis.breaker",
        "client_ip",
        "rules[]",
        "rules[].match",
        "rules[].match.headers[]",
        "rules[].key[]",
        "rules[].limits[]",
        "rules[].overrides[]",
        "rules[].cost",
        "response",
        "failure_response",
    ];
    assert_eq!(named, wanted);
}

/// The page with each block below a path that stands alone made what that file says, and those files.
fn with_files(page: &str) -> (String, Vec<String>) {
    let (mut expected, mut shown) = (String::new(), Vec::new());
    let (mut above, mut inside) = ("", None);
    for line in page.lines() {
        match (line.trim_start().starts_with("```"), inside) {
            (false, Some(true)) => continue,
            (false, Some(false)) => {}
            (true, Some(_)) => inside = None,
            (true, None) => {
                let path = above.strip_prefix('`').and_then(|rest| rest.strip_suffix('`'));
                let path = path.filter(|path| project().join(path).is_file());
                inside = Some(path.is_some());
                if let Some(path) = path {
                    expected.push_str(&format!("{line}\n{}", read(path)));
                    shown.push(path.to_owned());
                    continue;
                }
            }
            (false, None) if line.is_empty() => {}
            (false, None) => above = line,
        }
        expected.push_str(line);
        expected.push('\n');
    }
    (expected, shown)
}

#[test]
fn pages_show_the_files_that_they_name_above_a_block() {
    let mut of_recipes = Vec::new();
    let mut others = Vec::new();
    for path in documents() {
        let (expected, shown) = with_files(&read(&path));
        check_written(&path, &expected);
        if path == RECIPES { of_recipes = shown } else { others.extend(shown) }
    }
    of_recipes.sort();
    assert_eq!(of_recipes, recipes(), "a recipe has no place on its page");
    let application = ["meshquota.json", "quota.py"].map(|file| format!("envoy/migration/application/{file}"));
    assert!(application.iter().all(|file| others.contains(file)), "{others:?}");
    // And each recipe has its test.
    let tests = read("tests/e2e/recipes.rs");
    for path in of_recipes {
        assert!(Path::new(&path).exists() && tests.contains(&format!("../../{path}")), "{path} has no test");
    }
}

#[test]
fn a_document_with_every_field_is_kept_for_the_tests() {
    let document: Value = serde_json::from_str(&read("src/config/everything.json")).unwrap();
    let mut missing = Vec::new();
    unset(&SHAPE, &[&document], "", &mut missing);
    // The one goes without the other.
    assert_eq!(missing, ["client_ip.trusted_proxies"], "everything.json does not set everything");
}

#[test]
fn the_defaults_in_the_readme_are_those_of_the_code() {
    let readme = read("README.md");
    let mut seen = 0;
    for row in readme.lines().filter(|line| line.starts_with("| `")) {
        let cells = row.trim_matches('|').split(" | ").map(str::trim).collect::<Vec<_>>();
        let [fields, default, _] = cells.as_slice() else { continue };
        for path in fields.split(", ").map(|field| field.trim_matches('`')) {
            let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
            let field = object_at(parent).fields.iter().find(|field| field.name == name);
            let field = field.unwrap_or_else(|| panic!("README.md: there is no field {path}"));
            let expected = if field.required { "" } else { field.default.trim_matches('"') };
            assert_eq!(default.trim_matches('`'), expected, "README.md, {path}");
            seen += 1;
        }
    }
    assert!(seen >= 12, "{seen}");
}

#[test]
fn the_chart_has_the_script_of_the_tunnel_to_the_byte() {
    // A chart cannot reach outside its folder.
    check_written("envoy/chart/files/tunnel.lua", &read("lua/tunnel.lua"));
}
