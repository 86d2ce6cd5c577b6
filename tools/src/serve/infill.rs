//! Fill-in-the-middle prompts, for models whose tokenizer has the tokens.

use emberflow_engine::Text;

use super::error::ApiError;

/// Names of the tokens, as in llama.cpp.
const PREFIX: [&str; 8] = [
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
];
const SUFFIX: [&str; 8] = [
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
];
const MIDDLE: [&str; 8] = [
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|middle|>",
];
const PADDING: [&str; 5] = ["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"];
const REPOSITORY: [&str; 5] = [
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
];
const FILE: [&str; 1] = ["<|file_sep|>"];

/// Separator between other files if there is no token for it.
const SNIPPET: &str = "\n\n--- snippet ---\n\n";

/// Additional stop strings of an infill: the tokens for another file, another repository, and padding.
pub fn ends(text: &Text) -> Vec<String> {
    let names = PADDING.iter().chain(&REPOSITORY).chain(&FILE).copied();
    let declared = ["fim_pad", "fim_repository", "fim_file"];
    let declared = declared.iter().filter_map(|name| declared_as(text, name));
    let known = names
        .chain(declared)
        .filter(|name| text.tokenizer().token_to_id(name).is_some());
    known.map(str::to_owned).collect()
}

/// The token that the checkpoint declares for this purpose.
fn declared_as<'a>(text: &'a Text, name: &str) -> Option<&'a str> {
    text.meta().named_tokens.get(name).map(|token| &**token)
}

/// Another file of the repository.
#[derive(Debug)]
pub struct File {
    /// File name.
    pub name: String,
    /// Content.
    pub text: String,
}

/// Fill-in-the-middle tokens of a model.
#[derive(Debug, Clone, Copy)]
pub struct Infill<'a> {
    text: &'a Text,
    prefix: u32,
    suffix: u32,
    middle: u32,
    repository: Option<u32>,
    file: Option<u32>,
}

/// Tokenized parts of an infill prompt.
#[derive(Debug, Default)]
pub struct Gap {
    /// Before the gap.
    pub before: Vec<u32>,
    /// After the gap.
    pub after: Vec<u32>,
    /// Other files.
    pub others: Vec<u32>,
}

impl<'a> Infill<'a> {
    /// The tokens of the model's tokenizer.
    ///
    /// # Errors
    /// The tokenizer has none; `field` is the request field that needs them.
    pub fn of(text: &'a Text, field: &'static str) -> Result<Self, ApiError> {
        let tokenizer = text.tokenizer();
        let find = |declared: &str, names: &[&'static str]| {
            let declared = declared_as(text, declared).into_iter();
            let mut all = declared.chain(names.iter().copied());
            all.find_map(|name| tokenizer.token_to_id(name))
        };
        let (Some(prefix), Some(suffix), Some(middle)) = (
            find("fim_prefix", &PREFIX),
            find("fim_suffix", &SUFFIX),
            find("fim_middle", &MIDDLE),
        ) else {
            let message = format!(
                "this model's tokenizer has no fill-in-the-middle tokens (such as `{}`), which `{field}` needs",
                PREFIX[0]
            );
            return Err(ApiError::param(field, message));
        };
        Ok(Self {
            text,
            prefix,
            suffix,
            middle,
            repository: find("fim_repository", &REPOSITORY),
            file: find("fim_file", &FILE),
        })
    }

    fn tokens(&self, text: &str) -> Result<Vec<u32>, ApiError> {
        self.text.tokens(text).map_err(ApiError::invalid)
    }

    /// The prompt for the text between `before` and `after`.
    ///
    /// # Errors
    /// As [`Text::tokens`].
    pub fn between(&self, before: &str, after: &str) -> Result<Vec<u32>, ApiError> {
        Ok(self.prompt(Gap {
            before: self.tokens(before)?,
            after: self.tokens(after)?,
            others: Vec::new(),
        }))
    }

    /// Assembles the prompt.
    pub fn prompt(&self, gap: Gap) -> Vec<u32> {
        let mut all = gap.others;
        all.extend_from_slice(self.text.start_tokens());
        all.push(self.prefix);
        all.extend(gap.before);
        all.push(self.suffix);
        all.extend(gap.after);
        all.push(self.middle);
        all
    }

    /// The prompt for a gap in a file of a repository, at most `most` tokens. The end of the text before the gap and
    /// the beginning of the text after it are used in a ratio of three to one; then the last of the other files that
    /// fit.
    ///
    /// # Errors
    /// As [`Text::tokens`].
    pub fn in_repository(
        &self,
        before: &str,
        after: &str,
        files: &[File],
        most: usize,
    ) -> Result<Vec<u32>, ApiError> {
        let mut gap = Gap {
            before: self.tokens(before)?,
            after: self.tokens(after)?,
            others: self.others(files)?,
        };
        // The three tokens of the gap, and BOS.
        let room = most.saturating_sub(3 + self.text.start_tokens().len());
        let quarter = room / 4;
        let after = gap
            .after
            .len()
            .min(quarter.max(room.saturating_sub(gap.before.len())));
        gap.after.truncate(after);
        let before = gap.before.len().min(room - after);
        gap.before.drain(..gap.before.len() - before);
        let others = gap.others.len().min(room - after - before);
        gap.others.drain(..gap.others.len() - others);
        Ok(self.prompt(gap))
    }

    /// Tokens of the other files, followed by the marker of the current file.
    fn others(&self, files: &[File]) -> Result<Vec<u32>, ApiError> {
        let mut all = Vec::new();
        if let Some(token) = self.repository {
            all.push(token);
            all.extend(self.tokens("myproject\n")?);
        }
        for file in files {
            match self.file {
                Some(token) => {
                    all.push(token);
                    all.extend(self.tokens(&format!("{}\n", file.name))?);
                }
                None => all.extend(self.tokens(SNIPPET)?),
            }
            all.extend(self.tokens(&file.text)?);
        }
        if let Some(token) = self.file {
            all.push(token);
            all.extend(self.tokens("filename\n")?);
        }
        Ok(all)
    }
}
