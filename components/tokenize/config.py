"""Options of tokenize."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from crosstrain.components.core.config import Config as BaseConfig
from crosstrain.components.core.config import InputURI, NonNegativeInt, OutputURI, PositiveInt, Workers

SMALLEST_VOCABULARY = 258
"""256 bytes and the two special tokens."""
TRAINED_EOS = "<|endoftext|>"
"""EOS of the BPE that is trained when no tokenizer is given."""


class Work(BaseConfig):
    """What is tokenized and how, whoever does it."""

    corpus: InputURI
    """Corpus artifact, made by import_data."""
    tokenizer: InputURI = ""
    """Tokens, shards or model artifact whose tokenizer is used."""
    vocab_size: NonNegativeInt = 0
    """Ids of the byte-level BPE to train on the corpus, special tokens <|endoftext|> and <|pad|> included, at
    least 258; not looked at when a tokenizer is given."""
    tokenizer_uri: str = ""
    """Hugging Face tokenizer to use when no artifact gives one: folder, object-store prefix or tokenizer.json."""
    eos_token: str = ""
    """Text of the token that ends a document; empty: the tokenizer's own."""
    append_eos: bool = True
    """Put the EOS id after each document. BOS goes before each one if and only if the tokenizer wants one."""
    parse_special: bool = False
    """Turn the text of special tokens inside documents into their ids; otherwise it stays text. Never makes BOS or
    EOS double."""
    text_field: str = "text"
    """JSONL field or Parquet column that holds the text."""
    split_text: Literal["file", "blank_line", "separator"] = "file"
    """Plain text: what ends a document; a file is one document, or blank lines or a separator end one."""
    separator: str = ""
    """Text between two documents when split_text is separator; line ends around it belong to it."""
    on_invalid: Literal["error", "quarantine"] = "error"
    """Invalid UTF-8, broken JSON, lone surrogates: stop and name file and line, or set the document aside, list it
    in part-*.quarantine.jsonl and count it."""
    deduplicate: bool = False
    """Keep only the first of documents with equal text."""
    engine: Literal["auto", "fastokens", "tokenizers"] = "auto"
    """Encoder: auto takes fastokens when its ids prove equal on a probe, otherwise tokenizers."""
    training_bytes: PositiveInt = 100_000_000
    """Bytes of text that the BPE is trained on at most, taken evenly over the corpus."""
    unit_bytes: Annotated[int, Field(ge=1024)] = 1 << 27
    """Input bytes a unit of work; each unit becomes one part, and is what an interrupted run repeats at most."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.tokenizer and not self.tokenizer_uri and self.vocab_size < SMALLEST_VOCABULARY:
            raise ValueError(
                f"vocab_size: give a tokenizer or tokenizer_uri, or a vocab_size of at least {SMALLEST_VOCABULARY} to "
                f"train one (given {self.vocab_size})"
            )
        if not self.tokenizer and not self.tokenizer_uri and self.eos_token not in ("", TRAINED_EOS):
            raise ValueError(
                f"eos_token: the BPE trained here ends documents with {TRAINED_EOS} (given {self.eos_token!r}); leave "
                "it out, or give a tokenizer that has it"
            )
        if (self.split_text == "separator") != bool(self.separator):
            raise ValueError("separator: belongs to split_text=separator; give both or neither")
        return self


class Config(Work):
    """Turn a corpus of text into token documents: Megatron .bin/.idx pairs, one sequence a document.

    A byte order mark at a document's start is dropped and CRLF becomes LF. Documents that are empty or only
    white space are left out and counted, as are records whose text is null or not text.
    """

    output: OutputURI
    """Where to write the tokens artifact; what an interrupted run finished there is not done again."""
    workers: Workers = 0
    """Processes that tokenize; 0: as many as there are CPUs, and units, but one on one or two CPUs, which it uses
    both. The output does not depend on it."""
