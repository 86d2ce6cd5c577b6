//! The frame of tool calls: what a model family writes around names and arguments.

/// A part of the text around names and arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// This text. In parsing, its white space is optional.
    Text(String),
    /// An identifier of the call, which the model makes up.
    Id,
    /// The number of the call.
    Index,
}

/// How arguments are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notation {
    /// A JSON object.
    Json,
    /// `(key='text', flag=True)`: a call in Python.
    Python,
    /// `{key:<|"|>text<|"|>,flag:true}`: keys without quotes, strings in these quotes.
    Bare {
        /// The quotes of strings.
        quote: String,
    },
    /// A tag with the key, the value, and an end tag.
    Tags(Tags),
}

/// The tags of one argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tags {
    /// Before the key.
    pub open: String,
    /// Between key and value.
    pub middle: Middle,
    /// After the value.
    pub close: String,
    /// Between two arguments.
    pub between: String,
    /// Whether values may be in `<![CDATA[…]]>`.
    pub cdata: bool,
}

/// The text between key and value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Middle {
    /// Always the same; a value is a string if the parameter's schema says so.
    Plain(String),
    /// It says whether the value is a string.
    Typed {
        /// Up to the word that says it.
        before: String,
        /// The word for a string.
        text: String,
        /// The word for a number.
        number: String,
        /// From the word to the value.
        after: String,
    },
}

/// The members of a call that is a JSON object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Members {
    /// The member with the name.
    pub name: String,
    /// The member with the arguments.
    pub arguments: String,
}

/// How a model family writes calls: `open`, then for each call `head`, its name, `middle`, its arguments and `tail`,
/// with `between` between two calls, then `close`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Before the first call.
    pub open: String,
    /// Before a name.
    pub head: Vec<Piece>,
    /// Between name and arguments.
    pub middle: Vec<Piece>,
    /// How arguments are written.
    pub arguments: Notation,
    /// After the arguments.
    pub tail: Vec<Piece>,
    /// Between two calls; `None` if there is only one.
    pub between: Option<String>,
    /// After the last call.
    pub close: String,
    /// Members of the call if it is a JSON object, whose members may stand in any order.
    pub members: Option<Members>,
}

/// What precedes a name, in parsing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lead<'a> {
    /// This text without white space.
    Chunk(&'a str),
    /// An identifier.
    Id,
}

impl<'a> Lead<'a> {
    /// The text.
    pub fn text(self) -> Option<&'a str> {
        match self {
            Self::Chunk(text) => Some(text),
            Self::Id => None,
        }
    }
}

impl Frame {
    /// Whether nothing precedes a call.
    pub fn is_bare(&self) -> bool {
        self.members.is_some() && self.lead().is_empty()
    }

    /// The index in [`lead`](Self::lead) with which calls after the first begin.
    pub fn lead_of_next(&self) -> usize {
        let open = match self.members {
            Some(_) => self.open.trim_end().trim_end_matches('['),
            None => &self.open,
        };
        chunks(open).len().min(self.lead().len())
    }

    /// What precedes the name of the first call; in a JSON object, what precedes the object.
    pub fn lead(&self) -> Vec<Lead<'_>> {
        let mut all: Vec<Lead<'_>> = Vec::new();
        let brackets = |text: &'_ str| text.trim_end().trim_end_matches('[').len();
        let open = match self.members {
            Some(_) => &self.open[..brackets(&self.open)],
            None => &self.open[..],
        };
        all.extend(chunks(open).into_iter().map(Lead::Chunk));
        for piece in &self.head {
            match piece {
                Piece::Text(text) => {
                    let end = match (&self.members, text.find('{')) {
                        (Some(_), Some(at)) => brackets(&text[..at]),
                        _ => text.len(),
                    };
                    all.extend(chunks(&text[..end]).into_iter().map(Lead::Chunk));
                    if end < text.len() {
                        break;
                    }
                }
                Piece::Id | Piece::Index => all.push(Lead::Id),
            }
        }
        // It belongs to the name, and some models leave it out.
        if let Some(Lead::Chunk(last)) = all.last_mut() {
            *last = last.strip_suffix(FUNCTIONS).unwrap_or(last);
        }
        all.retain(|lead| *lead != Lead::Chunk(""));
        all
    }

    /// Indices in [`lead`](Self::lead) with which calls may begin: models leave out what precedes the call itself.
    pub fn starts(&self, lead: &[Lead<'_>]) -> Vec<usize> {
        let sign = |text: &str| text.starts_with(['<', '[']) && text.len() > 4;
        let starts = lead.iter().enumerate();
        let starts = starts.filter(|(at, lead)| match lead {
            Lead::Chunk(text) => *at == 0 || sign(text),
            Lead::Id => false,
        });
        starts.map(|(at, _)| at).collect()
    }

    /// The last text between name and arguments, without white space; empty if there is none.
    pub fn before_arguments(&self) -> &str {
        let last = self.middle.iter().rev().find_map(|piece| match piece {
            Piece::Text(text) => chunks(text).pop(),
            Piece::Id | Piece::Index => None,
        });
        last.unwrap_or_default()
    }

    /// Texts after the arguments of a call, or after its object, up to the next one, without white space.
    pub fn ends(&self) -> Vec<&str> {
        let tail = self.tail.iter().filter_map(|piece| match piece {
            Piece::Text(text) => Some(&text[..]),
            Piece::Id | Piece::Index => None,
        });
        let mut texts: Vec<&str> = tail.collect();
        if self.members.is_some() {
            let last = texts.pop().unwrap_or_default();
            texts = vec![last.rsplit_once('}').map_or(last, |(_, rest)| rest)];
        }
        texts.push(&self.close);
        texts.into_iter().flat_map(chunks).collect()
    }

    /// All fixed texts.
    pub fn texts(&self) -> Vec<&str> {
        let pieces = [&self.head, &self.middle, &self.tail];
        let pieces = pieces
            .into_iter()
            .flatten()
            .filter_map(|piece| match piece {
                Piece::Text(text) => Some(&text[..]),
                Piece::Id | Piece::Index => None,
            });
        let mut all: Vec<&str> = pieces.collect();
        all.extend([&self.open[..], &self.close[..]]);
        all.extend(self.between.as_deref());
        match &self.arguments {
            Notation::Json | Notation::Python => {}
            Notation::Bare { quote } => all.push(quote),
            Notation::Tags(tags) => {
                all.extend([&tags.open[..], &tags.close, &tags.between]);
                match &tags.middle {
                    Middle::Plain(text) => all.push(text),
                    Middle::Typed { before, after, .. } => all.extend([&before[..], after]),
                }
            }
        }
        all
    }
}

/// What precedes names in some formats, as if it were a part of them.
pub const FUNCTIONS: &str = "functions.";

/// A text in parts between which there may be white space: words, and tags that follow each other.
pub fn chunks(text: &str) -> Vec<&str> {
    let mut all = Vec::new();
    for word in text.split_whitespace() {
        let mut start = 0;
        let pairs = word.char_indices().zip(word.chars().skip(1));
        for ((at, c), next) in pairs {
            if matches!(c, '>' | ']' | '`') && matches!(next, '<' | '[' | '{') {
                all.push(&word[start..at + c.len_utf8()]);
                start = at + c.len_utf8();
            }
        }
        all.push(&word[start..]);
    }
    all
}

/// Whether a text begins with something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begins {
    /// It does; the length of both, with white space before it.
    With(usize),
    /// More text is needed.
    Unclear,
    /// It does not.
    Not,
}

/// Whether `text` begins with `chunk` after white space.
pub fn begins(text: &str, chunk: &str) -> Begins {
    let start = text.trim_start();
    if start.starts_with(chunk) {
        Begins::With(text.len() - start.len() + chunk.len())
    } else if chunk.starts_with(start) {
        Begins::Unclear
    } else {
        Begins::Not
    }
}

/// Whether `text` begins with all chunks of `wanted`, with white space before each.
pub fn begins_with_all(text: &str, wanted: &str) -> Begins {
    let mut at = 0;
    for chunk in chunks(wanted) {
        match begins(&text[at..], chunk) {
            Begins::With(length) => at += length,
            other => return other,
        }
    }
    Begins::With(at)
}

/// Length of the longest suffix of `text` that is a prefix of `tag`.
pub fn begun(text: &str, tag: &str) -> usize {
    let most = tag.len().min(text.len());
    let lengths = (1..=most).rev();
    lengths
        .filter(|&n| tag.is_char_boundary(n))
        .find(|&n| text.ends_with(&tag[..n]))
        .unwrap_or(0)
}
