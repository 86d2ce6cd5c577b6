//! An opened container with metadata and tokenizer, before memory is planned: enough to count a
//! prompt's tokens, on which the plan depends.

use std::path::Path;
use std::sync::Arc;

use emberflow_models::TextRules;
use emberflow_models::chat::ChatTemplate;
use emberflow_models::config::ModelConfig;
use emberflow_models::demo::Demo;
use emberflow_models::tokenizer::{Around, Tokenizer};
use emberflow_storage::container::Container;

use crate::error::Error;
use crate::meta::{ContainerMeta, Quant, SamplingDefaults};
use crate::sampler::Sampling;

/// An opened container, ready for [`crate::Engine::open`].
pub struct Model {
    pub(crate) container: Container,
    pub(crate) text: Text,
}

/// Tokenizer and chat template of a model.
#[derive(Debug, Clone)]
pub struct Text {
    /// The metadata, without the tokenizer's text and the rules.
    pub(crate) meta: ContainerMeta,
    tokenizer: Arc<Tokenizer>,
    around: Around,
    rules: Arc<TextRules>,
}

/// The container of a bundled demo model. It is part of the executable and read from that file like
/// any other container, so its neurons stay on disk.
///
/// # Errors
/// The program cannot find or read its own file.
pub fn demo_container(demo: Demo) -> Result<Container, Error> {
    let place = demo.locate()?;
    let name = Path::new(match demo {
        Demo::Dense => "bundled model",
        Demo::Experts => "bundled model demo-moe",
    });
    Ok(Container::open_at(
        place.file,
        name,
        place.offset,
        place.len,
    )?)
}

impl Model {
    /// Opens the packed model in the file `path`, as written by `emberflow pack`.
    ///
    /// # Errors
    /// A file that cannot be read or is not a container, or an error of [`Model::open`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open(Container::open(path.as_ref())?)
    }

    /// The dense bundled demo model.
    ///
    /// # Errors
    /// As [`demo_container`].
    pub fn demo() -> Result<Self, Error> {
        Self::open(demo_container(Demo::Dense)?)
    }

    /// Reads the metadata and builds the tokenizer.
    ///
    /// # Errors
    /// Invalid metadata or tokenizer.
    pub fn open(mut container: Container) -> Result<Self, Error> {
        let mut meta = ContainerMeta::parse(&container.take_meta(), container.path())?;
        let json = std::mem::take(&mut meta.tokenizer);
        let tokenizer = Arc::new(Tokenizer::from_json(&json)?);
        let mut around = tokenizer.around().clone();
        if around.before.is_empty() && meta.config.add_bos {
            around.before.extend(meta.config.bos);
        }
        let text = Text {
            rules: Arc::new(std::mem::take(&mut meta.rules)),
            meta,
            tokenizer,
            around,
        };
        Ok(Self { container, text })
    }

    /// The container.
    pub fn container(&self) -> &Container {
        &self.container
    }

    /// Tokenizer and chat template.
    pub fn text(&self) -> &Text {
        &self.text
    }
}

impl Text {
    /// The same texts, for a head with this configuration.
    pub(crate) fn of_head(&self, config: ModelConfig, quant: Quant) -> Self {
        let mut head = self.clone();
        (head.meta.config, head.meta.quant) = (config, quant);
        (head.meta.stats, head.meta.pruned) = (None, None);
        head
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.meta.config
    }

    /// The container's metadata, without the tokenizer's text.
    pub fn meta(&self) -> &ContainerMeta {
        &self.meta
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The chat template, if the model has one.
    ///
    /// # Errors
    /// A template that does not compile.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, Error> {
        let Some(template) = &self.meta.chat_template else {
            return Ok(None);
        };
        // A checkpoint's names count, not what its texts start and end with: that may be another token, or the
        // template may have none.
        let mut tokens: Vec<(&str, &str)> = (self.meta.named_tokens.iter())
            .map(|(name, text)| (&**name, &**text))
            .collect();
        let ends = [self.config().bos, self.config().eos.first().copied()];
        let ends = ends.map(|id| id.and_then(|id| self.tokenizer.id_to_token(id)));
        if tokens.is_empty() {
            let names = ["bos_token", "eos_token"].into_iter();
            tokens.extend(
                names
                    .zip(&ends)
                    .filter_map(|(name, text)| Some((name, text.as_deref()?))),
            );
        }
        tokens.retain(|(_, text)| !text.is_empty());
        let template = ChatTemplate::new(template, &tokens)?;
        let tool_template = self.meta.tool_template.as_deref();
        Ok(Some(template.with_tool_use(tool_template)?))
    }

    /// The checkpoint's rules on generated texts.
    pub fn rules(&self) -> &Arc<TextRules> {
        &self.rules
    }

    /// Sampling parameters: those of `chosen`, then those recommended by the checkpoint. Without a
    /// temperature in either: greedy, or temperature 1 if any filter is set.
    pub fn sampling(&self, chosen: SamplingDefaults) -> Sampling {
        chosen.or(self.meta.sampling).sampling()
    }

    /// As [`sampling`](Self::sampling), in chats and servers: if the checkpoint does not recommend how to draw tokens,
    /// then what `chosen` leaves open is [`SamplingDefaults::CHAT`].
    pub fn chat_sampling(&self, chosen: SamplingDefaults) -> Sampling {
        chosen.in_chats(self.meta.sampling)
    }

    /// Tokens that the model needs before every text: a start token, or none.
    pub fn start_tokens(&self) -> &[u32] {
        &self.around.before
    }

    /// Tokens of a text, without start and end tokens.
    ///
    /// # Errors
    /// [`Error::Token`] for a token outside the model's vocabulary.
    pub fn tokens(&self, text: &str) -> Result<Vec<u32>, Error> {
        let ids = self.tokenizer.encode(text, false)?;
        self.check(&ids)?;
        Ok(ids)
    }

    /// Checks that all tokens are within the model's vocabulary.
    ///
    /// # Errors
    /// [`Error::Token`] for the first one outside.
    pub fn check(&self, ids: &[u32]) -> Result<(), Error> {
        let vocab = self.config().vocab;
        match ids.iter().find(|&&t| t >= vocab) {
            Some(&token) => Err(Error::Token { token, vocab }),
            None => Ok(()),
        }
    }

    /// Tokens of a text, with the model's start and end tokens unless the text contains them.
    ///
    /// # Errors
    /// As [`Text::tokens`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        Ok(self.framed(self.tokens(text)?))
    }

    /// Adds the model's start and end tokens, unless `ids` contains them.
    pub fn framed(&self, mut ids: Vec<u32>) -> Vec<u32> {
        let Around { before, after } = &self.around;
        if !ids.starts_with(before) {
            ids.splice(0..0, before.iter().copied());
        }
        if !ids.ends_with(after) {
            ids.extend(after);
        }
        ids
    }
}
