//! The folder of LM Studio: `OWNER/NAME/FILE.gguf`.

use std::path::PathBuf;

use serde::Deserialize;

use super::{Local, Store, by_owner_and_name, home, read_small};

struct LmStudio(Vec<PathBuf>);

/// What is used of its settings.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Settings {
    /// The folder of models, if the user has chosen one.
    downloads_folder: Option<PathBuf>,
}

/// The folder in the home of LM Studio, and that of versions before 0.3.
pub(super) fn store() -> Option<Box<dyn Store>> {
    let user = home()?;
    let moved = read_small(&user.join(".lmstudio-home-pointer"));
    let moved = moved.map(|path| PathBuf::from(path.trim()));
    let now = moved.unwrap_or_else(|| user.join(".lmstudio"));
    let settings = read_small(&now.join("settings.json"));
    let settings: Option<Settings> = settings.and_then(|text| serde_json::from_str(&text).ok());
    let chosen = settings.and_then(|settings| settings.downloads_folder);
    let roots = vec![
        chosen.unwrap_or_else(|| now.join("models")),
        user.join(".cache/lm-studio/models"),
    ];
    Some(Box::new(LmStudio(roots)))
}

impl Store for LmStudio {
    fn models(&self) -> Vec<Local> {
        let roots = self.0.iter();
        roots
            .flat_map(|root| by_owner_and_name(root, "lmstudio"))
            .collect()
    }
}
