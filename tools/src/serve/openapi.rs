//! `/openapi.json`: what the server accepts and returns.

/// The description, of this version.
pub fn description() -> String {
    DESCRIPTION.replace("\"VERSION\"", concat!('"', env!("CARGO_PKG_VERSION"), '"'))
}

/// The description but for the version.
const DESCRIPTION: &str = include_str!("openapi.json");

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    fn description() -> Value {
        serde_json::from_str(&super::description()).unwrap()
    }

    /// The routes that a file's source names, under the prefixes that it has.
    fn routes(source: &str) -> BTreeSet<String> {
        let parts = source.split(".route(").skip(1);
        let paths = parts.filter_map(|part| part.trim_start().strip_prefix('"'));
        let names = paths.filter_map(|path| path.split('"').next());
        names.map(str::to_owned).collect()
    }

    #[test]
    fn every_route_is_described() {
        let mut wanted = routes(include_str!("http.rs"));
        assert!(wanted.len() > 12, "{wanted:?}");
        // These are there a second time.
        for path in ["/chat/completions", "/completions", "/responses", "/models"] {
            wanted.insert(format!("/v1{path}"));
        }
        for more in [
            include_str!("ollama_api.rs"),
            include_str!("embeddings.rs"),
            include_str!("messages_api.rs"),
            include_str!("native_api.rs"),
        ] {
            wanted.extend(routes(more));
        }
        let described = description();
        let described: BTreeSet<String> = described["paths"]
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect();
        assert_eq!(described, wanted);
    }

    /// The members that serde reads into a struct, from its source; those of flattened structs apart.
    fn members(source: &str, name: &str) -> BTreeSet<String> {
        let (_, after) = source.split_once(&format!("struct {name} {{")).expect(name);
        let (body, _) = after.split_once("\n}").expect(name);
        let mut all = BTreeSet::new();
        let mut renamed = None;
        let mut flattened = false;
        for line in body.lines().map(str::trim) {
            let quoted = || line.split('"').nth(1).map(str::to_owned);
            if line.starts_with("#[serde(alias") {
                all.extend(quoted());
            } else if line.starts_with("#[serde(rename") {
                renamed = quoted();
            } else if line.starts_with("#[serde(flatten)]") {
                flattened = true;
            } else if let Some((field, _)) = line.split_once(": ").filter(|_| line.ends_with(',')) {
                let field = field.trim_start_matches("pub ").to_owned();
                let field = renamed.take().unwrap_or(field);
                if !std::mem::take(&mut flattened) {
                    all.insert(field);
                }
            }
        }
        all
    }

    #[test]
    fn every_field_is_described_and_no_other() {
        let api = include_str!("api.rs");
        let common = &members(api, "Common") | &members(include_str!("rules/asked.rs"), "Asked");
        let tools = members(include_str!("calls/asked.rs"), "Asked");
        let thoughts = members(include_str!("thoughts/asked.rs"), "Asked");
        let with_tools = &(&common | &tools) | &thoughts;
        let none = BTreeSet::new();
        let http = include_str!("http.rs");
        let embeddings = include_str!("embeddings.rs");
        for (name, source, shared) in [
            ("ChatRequest", api, &with_tools),
            ("ResponsesRequest", api, &with_tools),
            ("CompletionRequest", api, &common),
            ("InMessage", api, &none),
            ("InItem", api, &none),
            ("ContentPart", api, &none),
            ("Tokenize", http, &none),
            ("Detokenize", http, &none),
            ("EmbeddingsRequest", embeddings, &none),
        ] {
            let wanted = &members(source, name) | shared;
            assert!(
                wanted.len() > 1 || name == "Detokenize",
                "{name}: {wanted:?}"
            );
            let properties = description()["components"]["schemas"][name]["properties"].take();
            let described: BTreeSet<String> = properties
                .as_object()
                .expect(name)
                .keys()
                .cloned()
                .collect();
            assert_eq!(described, wanted, "{name}");
        }
    }
}
